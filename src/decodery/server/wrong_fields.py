"""What is wrong with a field of a request, in one sentence with the field, what it may be and the value given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

_FIELD, _TYPES = re.compile(r"[a-z][a-z0-9_]*"), frozenset(["str", "int", "float", "bool", "list", "dict", "literal"])
_KINDS = {
    "string_type": "a text",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""What a field may be, by the error of any other value."""
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
_MOST_SHOWN = 60
"""Characters of a value in a message."""


def wrong_field(error: ValidationError) -> tuple[str, str | None]:
    """The message for a request that does not fit its fields.

    Args:
        error: What pydantic found.

    Returns:
        A sentence, and the path of the field.
    """
    # Of alternatives those that came furthest are what was meant.
    found = [(_path(each["loc"]), each) for each in error.errors(include_url=False)]
    longest = max(len(path) for path, _ in found)
    path = next(path for path, _ in found if len(path) == longest)
    alternatives = [each for other, each in found if other == path]
    where = ".".join(path)
    return f"{where or 'the request'} {_said(alternatives)}", where or None


def _path(location: Sequence[int | str]) -> list[str]:
    """Where a field lies. Pydantic names the types that it tried as well, whose names no client knows."""
    return [str(part) for part in location if isinstance(part, int) or (_FIELD.fullmatch(part) and part not in _TYPES)]


def _said(alternatives: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with a value: its kind, unless it has one that is allowed."""
    exact = next((each for each in alternatives if each["type"] not in {*_KINDS, "literal_error"}), None)
    if exact is not None:
        return _exact(exact)
    kinds = dict.fromkeys(_KINDS.get(each["type"]) or _literals(each["ctx"]["expected"]) for each in alternatives)
    return f"must be {' or '.join(kinds)}, not {_shown(alternatives[0]['input'])}"


def _literals(expected: str) -> str:
    """The values that a field may have, as JSON spells them."""
    return {"True": "true", "False": "false"}.get(expected, expected)


def _exact(error: Mapping[str, Any]) -> str:
    kind, bounds, given = error["type"], error.get("ctx", {}), _shown(error["input"])
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not a field"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {_shown(bounds[name]).removesuffix('.0')}, not {given}"
    if kind == "too_long":
        return f"may have at most {bounds['max_length']} items" if bounds["max_length"] else "must be empty"
    if kind == "too_short":
        return f"must have at least {bounds['min_length']} item{'s' if bounds['min_length'] > 1 else ''}"
    if kind == "string_too_long":
        return f"may have at most {bounds['max_length']} characters, and has {len(error['input'])}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return f"must match {bounds['pattern']}, not {given}"
    return f"is wrong: {error['msg'].removeprefix('Value error, ')}"


def _shown(value: Any) -> str:
    """A value as JSON has it; of one that is long its beginning, and of a list or an object its kind."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
