"""How large a description may be in what takes longest to read."""

from __future__ import annotations

from typing import Any

from decodery.core.errors import ConstraintError

MOST_PATTERN = 1 << 16
"""Characters of a regular expression, and of all those in one schema; reading so many takes half a second."""
_MOST_SCHEMAS = 1 << 16
"""Values in a schema, schemas among them."""


def require_size(schema: Any) -> None:
    """Raise ConstraintError for a JSON schema with too many values, or too much text in patterns."""
    values, characters = 0, 0
    inside = [schema]
    while inside:
        each = inside.pop()
        values += 1
        if isinstance(each, dict):
            inside += each.values()
            pattern, named = each.get("pattern"), each.get("patternProperties")
            characters += len(pattern) if isinstance(pattern, str) else 0
            characters += sum(map(len, named)) if isinstance(named, dict) else 0
        elif isinstance(each, list):
            inside += each
    if values > _MOST_SCHEMAS:
        raise ConstraintError(
            f"the JSON schema has {values} values; the limit is {_MOST_SCHEMAS}: ask for less at once"
        )
    if characters > MOST_PATTERN:
        raise ConstraintError(
            f"the JSON schema has {characters} characters in patterns; the limit is {MOST_PATTERN}: shorten them"
        )
