"""Closed objects: an object whose schema lists properties gets no others, unless the schema allows them.

JSON Schema lets such an object hold any other property. A small model then adds properties until it is cut, so tools
that write JSON close these objects. Where several schemas describe one object (`allOf`, a reference with neighbours),
the properties of all of them count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .references import SchemaLocation, entered

Find = Callable[[Any, SchemaLocation], tuple[Any, SchemaLocation]]

_OPENS = frozenset(
    [
        *("additionalProperties", "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum"),
        *("if", "maxProperties", "not", "patternProperties", "propertyNames", "then", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    ]
)
"""Keywords that restrict properties in other ways than by name: such objects are not changed."""
_OF_OBJECTS = frozenset(["minProperties", "properties", "required"])
_ALTERNATIVES = ("anyOf", "oneOf")
_MOST_SCHEMAS = 256
"""Maximum number of schemas of one object; an object with more stays open."""


def describes_alone(schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether each schema under this keyword is the only one that describes its object."""
    others = _OF_OBJECTS | _OPENS | {"$ref", "allOf", *_ALTERNATIVES}
    if any(other in schema for other in others - {keyword}):
        return False
    return keyword != "allOf" or (isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)


def closed(schema: Mapping[str, Any], place: SchemaLocation, find: Find) -> dict[str, Any]:
    """Close a schema that is the only one of its object, so that unlisted properties are not allowed.

    Args:
        schema: The schema.
        place: Its location.
        find: Finds the schema that a reference at a location points to.

    Returns:
        The schema with `additionalProperties` false, and with every property that its parts list or require. The
        unchanged schema where it lists none, or restricts properties in other ways.
    """
    if not any(keyword in schema for keyword in ("properties", "allOf", "$ref")):
        return dict(schema)
    listed, names = False, dict[str, Any]()
    for part in _parts(schema, place, find):
        if part is None or not isinstance(part.get("properties", {}), Mapping) or _OPENS & part.keys():
            return dict(schema)
        required = part.get("required", [])
        listed = listed or "properties" in part
        names.update(dict.fromkeys(part.get("properties", {}), True))
        names.update((name, True) for name in (required if isinstance(required, list) else ()) if isinstance(name, str))
        least = part.get("minProperties", 0)
        if not isinstance(least, int) or least > len(names):
            return dict(schema)
    if not listed:
        return dict(schema)
    own = dict(schema.get("properties", {}))
    return {
        **schema,
        "properties": own | {name: True for name in names if name not in own},
        "additionalProperties": False,
    }


def _parts(schema: Any, place: SchemaLocation, find: Find) -> Iterator[Mapping[str, Any] | None]:
    """The schema and all others that describe the same object; None where there are too many."""
    waiting, seen = [(schema, place)], set[int]()
    while waiting:
        part, around = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        if len(seen) >= _MOST_SCHEMAS:
            yield None
            return
        seen.add(id(part))
        inside = entered(part, around)
        if "$ref" in part:
            waiting.append(find(part["$ref"], inside))
            if inside.replaces:
                continue
        for keyword in ("allOf", *_ALTERNATIVES):
            if isinstance(part.get(keyword), list):
                waiting += [(each, inside) for each in part[keyword]]
        yield part
