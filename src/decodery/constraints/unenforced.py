"""What of a JSON schema no mask enforces: refused, or left to a check of the finished text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decodery.core.errors import ConstraintError, SettingsError


@dataclass
class Unenforced:
    """What may be left out of a schema's mask, and what was.

    Args:
        allowed: keywords, and patterns that are no regular language, may be left out: finished texts are checked.
        formats: formats without a grammar may be ignored, as JSON Schema does by default.
        offered: the author of the schema can choose both.
        found: what was left out, such as "not at #/items".
        ignored: formats that were ignored, likewise.
    """

    allowed: bool = False
    formats: bool = False
    offered: bool = False
    found: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def keyword(self, keyword: str, path: str) -> None:
        """Leave a keyword out.

        Raises:
            ConstraintError: If that is not allowed.
        """
        if not self.allowed:
            raise ConstraintError(
                f"the JSON schema uses {keyword!r} at {path}, which cannot be enforced: leave it out and check the "
                f"result, or say it with other keywords{self._or('unenforced=check')}"
            )
        self.found.append(f"{keyword} at {path}")

    def pattern(self, error: ConstraintError, path: str) -> None:
        """Leave a pattern out that no engine reads. Raises its error where that is not allowed."""
        if not self.allowed:
            raise ConstraintError(f"{error}{self._or('unenforced=check')}") from error
        self.found.append(f"pattern at {path}")

    def format(self, name: str, path: str) -> None:
        """Ignore a format.

        Raises:
            ConstraintError: If that is not allowed.
        """
        if not self.formats:
            raise ConstraintError(
                f"the JSON schema uses the format {name!r} at {path}, which cannot be enforced: leave it out"
                f"{self._or('unknown_formats=ignore')}"
            )
        self.ignored.append(f"{name} at {path}")

    def _or(self, setting: str) -> str:
        """The setting that would allow it, for a message."""
        return f", or, in Python and on the command line, set {setting} of json-schema" if self.offered else ""


def require_checkable(schema: Any) -> None:
    """Raise ConstraintError for a schema with a pattern that the check of finished texts could not read.

    Args:
        schema: the whole schema, of whose patterns the check runs all, with Python's `re`.
    """
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            named = each.get("patternProperties")
            patterns = [each.get("pattern"), *(named if isinstance(named, Mapping) else ())]
            for pattern in patterns:
                try:
                    re.compile(pattern if isinstance(pattern, str) else "")
                except re.error as error:
                    raise ConstraintError(
                        f"finished texts are checked with Python's re, which does not read the pattern {pattern!r} "
                        f"({error}): write it without that, or leave out unenforced=check"
                    ) from error
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def violation(schema: Mapping[str, Any] | bool, text: str) -> str | None:
    """What a text breaks of a schema, as the jsonschema package finds it; None for nothing.

    Args:
        schema: the whole schema, as its author wrote it.
        text: JSON.
    """
    try:
        from jsonschema.exceptions import best_match
        from jsonschema.validators import Draft202012Validator, validator_for
    except ImportError as error:
        raise SettingsError("checking JSON needs jsonschema: run `pip install 'decodery[constrain]'`") from error
    found = best_match(validator_for(schema, default=Draft202012Validator)(schema).iter_errors(json.loads(text)))
    return None if found is None else f"{found.json_path}: {found.message}"
