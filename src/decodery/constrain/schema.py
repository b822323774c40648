"""What of JSON Schema can be enforced exactly, and the form the engine gets it in.

The engine must never enforce less than the schema says. What it would leave out, or enforce less of, is refused here by
keyword and place; what means the same in another form is rewritten.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConstraintError
from .bounds import require_bounds
from .pattern import parse, printed

_SCHEMA = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
        "x-guidance",
    ]
)
_ENFORCED = frozenset(
    [
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
        "$defs",
        "definitions",
    ]
)
_IDLE: dict[str, Any] = {
    "uniqueItems": lambda value, schema: value is False or _most(schema, "maxItems") <= 1,
    "not": lambda value, schema: value is False,
    "if": lambda value, schema: "then" not in schema and "else" not in schema,
    "then": lambda value, schema: "if" not in schema,
    "else": lambda value, schema: "if" not in schema,
    "dependencies": lambda value, schema: value == {},
    "dependentRequired": lambda value, schema: value == {},
    "dependentSchemas": lambda value, schema: value == {},
    "propertyNames": lambda value, schema: value in (True, {}),
    "contains": lambda value, schema: False,
    "minContains": lambda value, schema: "contains" not in schema,
    "maxContains": lambda value, schema: "contains" not in schema,
    "unevaluatedItems": lambda value, schema: value in (True, {}),
    "unevaluatedProperties": lambda value, schema: value in (True, {}),
    "$dynamicRef": lambda value, schema: False,
    "$recursiveRef": lambda value, schema: False,
}
"""Keywords of any draft that are not enforced, and where they say nothing and can be left out."""

_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
_LEAP = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP}-02-29)"
_ZONE = r"(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?{_ZONE}|23:59:60(?:\.\d+)?(?:[zZ]|[+-]00:00))"
_LABEL = "A(?:A|HA|HHA|H(?:AH|-A)H{0,58}A)?".replace("A", "[A-Za-z0-9]").replace("H", "[A-Za-z0-9-]")
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""Formats of which the engine lets too much pass: a 29 February of any year, leap seconds at any time, host names of
any length or with hyphens where only encoded names have them."""
_ENGINE_FORMATS = frozenset(["duration", "email", "ipv4", "ipv6", "uri", "uuid"])
_MOST_EXACT = 2**53


def prepare(schema: Any) -> Any:
    """The schema in the form the engine gets. Raises ConstraintError naming what it cannot be held to exactly."""
    require_bounds(schema)
    pointers = re.findall(r'"\$ref": "#/([^/"]+)', json.dumps(schema))
    return _walk(schema, "#", frozenset(pointers))


def _collection(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Schemas under a name that no draft knows, perhaps sorted into groups."""
    return {
        key: _walk(each, f"{path}/{key}")
        if isinstance(each, bool) or each.keys() & _ENFORCED
        else _collection(each, path)
        for key, each in value.items()
        if isinstance(each, Mapping | bool)
    }


def _walk(schema: Any, path: str, referred: frozenset[str] = frozenset()) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise ConstraintError(f"the JSON schema is wrong at {path}: a schema is an object or true or false")
    done: dict[str, Any] = {}
    for keyword, value in schema.items():
        place = f"{path}/{keyword}"
        if keyword in _IDLE:
            if not _IDLE[keyword](value, schema):
                raise unsupported(keyword, path)
        elif keyword in _ANNOTATIONS or keyword not in _ENFORCED:
            # What no draft defines is a remark to people, or a place for schemas that references point to.
            if keyword in ("$id", "id", "$anchor", "$schema"):
                done[keyword] = value
            elif keyword in referred and isinstance(value, Mapping):
                done[keyword] = _collection(value, place)
        elif keyword in _MAPS:
            if not isinstance(value, Mapping):
                raise ConstraintError(f"the JSON schema is wrong at {place}: it must be an object")
            named = keyword == "patternProperties"
            done[keyword] = {(_pattern(k, place) if named else k): _walk(v, f"{place}/{k}") for k, v in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            done[keyword] = [_walk(each, f"{place}/{number}") for number, each in enumerate(value)]
        elif keyword in _SCHEMA:
            done[keyword] = _walk(value, place)
        else:
            # A count may be written 2.0.
            counts = keyword.startswith(("min", "max")) and isinstance(value, float) and value.is_integer()
            done[keyword] = int(value) if counts and keyword not in ("minimum", "maximum") else value
    _check_literals(done, path)
    _check_numbers(done, path)
    _check_properties(done, path)
    return _with_strings(done, path)


def unsupported(keyword: str, path: str) -> ConstraintError:
    return ConstraintError(
        f"the JSON schema uses {keyword!r} at {path}, which cannot be enforced: leave it out and check the result, "
        "or say it with other keywords"
    )


def _with_strings(schema: dict[str, Any], path: str) -> dict[str, Any]:
    patterns = []
    if "pattern" in schema:
        patterns.append(_pattern(schema.pop("pattern"), f"{path}/pattern"))
    if "format" in schema and "string" in _types(schema):
        name = schema["format"]
        if name in _FORMATS:
            patterns.append(printed(parse(_FORMATS[name])))
            if name == "hostname":
                schema["maxLength"] = min(253, _most(schema, "maxLength"))
        elif name not in _ENGINE_FORMATS:
            raise ConstraintError(f"the JSON schema uses the format {name!r} at {path}, which cannot be enforced")
    if "format" in schema and schema["format"] not in _ENGINE_FORMATS:
        del schema["format"]
    if patterns:
        schema["pattern"] = patterns[0]
    if len(patterns) > 1:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": patterns[1]}]
    return schema


def _pattern(text: Any, path: str) -> str:
    if not isinstance(text, str):
        raise ConstraintError(f"the JSON schema is wrong at {path}: a pattern is a text")
    try:
        return printed(parse(text))
    except ConstraintError as error:
        raise ConstraintError(f"the JSON schema's pattern at {path} cannot be enforced: {error}") from error


def _check_literals(schema: dict[str, Any], path: str) -> None:
    """Strings the engine may not write: its escapes \\uXXXX would let a known key pass as another one."""
    for keyword in ("const", "enum"):
        if keyword in schema:
            written = json.dumps(schema[keyword], ensure_ascii=False)
            if "\\u00" in written.replace("\\\\", "") or "\x7f" in written:
                raise ConstraintError(f"the JSON schema's {keyword!r} at {path} holds a control character")


def _check_numbers(schema: dict[str, Any], path: str) -> None:
    """The engine computes bounds in double precision: a bound it would round is moved inward, or refused."""
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = schema.get(keyword)
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ConstraintError(f"the JSON schema is wrong at {path}/{keyword}: it must be a number")
        if abs(value) <= _MOST_EXACT:
            continue
        outward = value > 0 if keyword in ("maximum", "exclusiveMaximum") else value < 0
        if keyword == "multipleOf" or not outward:
            raise ConstraintError(f"the JSON schema's {keyword} at {path} is beyond what can be enforced exactly, 2^53")
        schema[keyword] = math.copysign(_MOST_EXACT, value)


def _check_properties(schema: dict[str, Any], path: str) -> None:
    """Of keys the schema does not list, the engine does not know whether one comes twice."""
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    listed = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least - listed > 1:
        raise unsupported("minProperties", path)


def _types(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("type", ["string"])
    return found if isinstance(found, list) else [found]


def _most(schema: Mapping[str, Any], keyword: str) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.inf
