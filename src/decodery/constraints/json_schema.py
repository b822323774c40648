"""Constraint to JSON texts that are valid under a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.registry import register
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import AfterCheck

from .base import ConstraintSpec, require_text
from .engine import GrammarConstraint
from .lark import lark
from .schema import prepare
from .unenforced import Unenforced, require_checkable, violation

_SPACE = r"[ \n\r\t]{1,32}"
_LAYOUTS: dict[str, dict[str, Any]] = {
    "flexible": {"whitespace_pattern": _SPACE},
    "compact": {"whitespace_flexible": False},
}


@register(
    "json-schema",
    paper="Generating Structured Outputs from Language Models: Benchmark and Studies (2025)",
    guarantee="every finished text is valid under the whole schema; what cannot be enforced is an error",
    texts=("schema",),
)
@dataclass(frozen=True)
class JSONSchema(ConstraintSpec):
    """Writes JSON that is valid under a schema, its properties in the order the schema lists them.

    `$ref` may refer to any part of the schema, and `oneOf` is enforced where its options are proved to exclude each
    other. Some valid texts are never written: properties in another order, numbers like 1.0 for integers, integers
    beyond 2^53 under a bound beyond it, numbers closer to an exclusive bound than the next double (1e-15 at 0),
    decimals with fewer digits than a bound or step has, escapes such as \\u0041, and exponents and -0 under a bound.
    U+007F is never written.

    Attributes:
        schema: An object, true, or the text of one; drafts 4 to 2020-12, including `format`.
        additional_properties: Other properties of an object whose schema lists `properties` and has no
            `additionalProperties`. "closed" allows none, as llama.cpp and xgrammar do, so that texts of small models
            end. "open" allows any, as JSON Schema does.
        whitespace: "flexible" allows up to 32 blanks where JSON allows any; "compact" allows none.
        unenforced: Handling of keywords that no mask enforces, such as `not` or `uniqueItems`. "refuse" is an error.
            "check" checks finished texts with the jsonschema package: `generate` writes a text again if it fails;
            streams and searches check it once. `Output.check` has the number of tries and the violation.
        unknown_formats: "refuse" formats without a grammar, or "ignore" them; `Output.check` lists them.
        max_tries: Maximum number of texts that are written until one passes the check.
    """

    schema: str | Mapping[str, Any] | bool
    whitespace: Literal["flexible", "compact"] = "flexible"
    additional_properties: Literal["closed", "open"] = "closed"
    unenforced: Literal["refuse", "check"] = "refuse"
    unknown_formats: Literal["refuse", "ignore"] = "refuse"
    max_tries: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.whitespace not in _LAYOUTS:
            raise SettingsError(f"json-schema: whitespace must be flexible or compact, not {self.whitespace!r}")
        if self.additional_properties not in ("closed", "open"):
            raise SettingsError(
                f"additional_properties of json-schema is closed or open, not {self.additional_properties!r}"
            )
        if self.unenforced not in ("refuse", "check"):
            raise SettingsError(f"json-schema: unenforced must be refuse or check, not {self.unenforced!r}")
        if self.unknown_formats not in ("refuse", "ignore"):
            raise SettingsError(f"json-schema: unknown_formats must be refuse or ignore, not {self.unknown_formats!r}")
        if self.max_tries < 1:
            raise SettingsError(f"json-schema: max_tries must be at least 1, not {self.max_tries}")
        try:
            text = self.schema if isinstance(self.schema, str) else json.dumps(self.schema, allow_nan=False)
            require_text("JSON schema", text)
            if not isinstance(json.loads(text), dict | bool):
                raise ConstraintError("a JSON schema is an object, true or false")
        except (ValueError, TypeError, RecursionError) as error:
            raise ConstraintError(f"the JSON schema is not JSON: {error}") from error
        object.__setattr__(self, "schema", text)

    def compile(self, vocabulary: Vocabulary) -> GrammarConstraint:
        assert isinstance(self.schema, str)
        whole = json.loads(self.schema)
        left = Unenforced(self.unenforced == "check", self.unknown_formats == "ignore", offered=True)
        schema = prepare(whole, left, closes=self.additional_properties == "closed")
        # A boolean has no place for options; it says the same as these.
        schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
        options = {**_LAYOUTS[self.whitespace], "json_allowed_escapes": 'nrbtf\\"'}
        text = json.dumps({**schema, "x-guidance": options})
        try:
            constraint = GrammarConstraint(vocabulary, lark(f"start: %json {text}", self.mode))
        except ConstraintError as error:
            raise ConstraintError(f"the JSON schema cannot be enforced: {_said(str(error))}") from error
        if left.found:
            require_checkable(whole)
        if left.found or left.ignored:
            constraint.after = AfterCheck(
                tuple(left.found), tuple(left.ignored), self.max_tries, partial(violation, whole)
            )
        return constraint


def _said(message: str) -> str:
    """The engine's reason, in the words of the schema."""
    if "oneOf" in message:
        return "'oneOf' is supported only where its options exclude each other; use 'anyOf' if that is what is meant"
    return re.sub(r"^.*?(Error|error): ", "", message)
