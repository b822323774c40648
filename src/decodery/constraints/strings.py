"""Strings of a JSON schema: patterns and formats in the form the engine gets them in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from decodery.core.errors import ConstraintError

from .formats import ENGINE_FORMATS, FORMATS
from .pattern import parse, printed
from .unenforced import Unenforced


def with_strings(schema: dict[str, Any], path: str, unenforced: Unenforced) -> dict[str, Any]:
    """The schema with patterns and formats the engine reads; those it lacks are refused or left out."""
    patterns = []
    if "pattern" in schema:
        try:
            patterns.append(_pattern(schema.pop("pattern"), f"{path}/pattern"))
        except ConstraintError as error:
            unenforced.pattern(error, path)
    if "format" in schema:
        name = schema["format"]
        if not isinstance(name, str):
            raise ConstraintError(f"the JSON schema is wrong at {path}/format: it must be a text")
        if name not in ENGINE_FORMATS:
            del schema["format"]
            if "string" in _types(schema):
                if name in FORMATS:
                    patterns.append(printed(parse(FORMATS[name])))
                else:
                    unenforced.format(name, path)
                if name == "hostname":
                    schema["maxLength"] = min(253, most(schema, "maxLength"))
    for pattern in patterns:
        also(schema, "pattern", pattern)
    return schema


def with_patterns(schemas: dict[str, Any], path: str) -> dict[str, Any]:
    """Schemas by the pattern of a name; two ways to write one pattern are one."""
    found: dict[str, list[Any]] = {}
    for text, schema in schemas.items():
        found.setdefault(_pattern(text, path), []).append(schema)
    return {text: each[0] if len(each) == 1 else {"allOf": each} for text, each in found.items()}


def _pattern(text: Any, path: str) -> str:
    if not isinstance(text, str):
        raise ConstraintError(f"the JSON schema is wrong at {path}: a pattern is a text")
    try:
        return printed(parse(text))
    except ConstraintError as error:
        raise ConstraintError(f"the JSON schema's pattern at {path} cannot be enforced: {error}") from error


def also(schema: dict[str, Any], keyword: str, value: Any) -> None:
    """Say one more thing in a schema that may say something with the same keyword."""
    if keyword in schema:
        schema["allOf"] = [*schema.get("allOf", []), {keyword: value}]
    else:
        schema[keyword] = value


def _types(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("type", ["string"])
    return found if isinstance(found, list) else [found]


def most(schema: Mapping[str, Any], keyword: str) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.inf
