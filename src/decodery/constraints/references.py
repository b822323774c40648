"""What the references of a JSON schema point to: URIs, JSON pointers and anchors, inside the one document.

Nothing is fetched, and nothing is copied: a schema that is referred to is found where it lies, which may be under a
name that no draft knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from decodery.core.errors import ConstraintError

LATEST = 2020
_DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_ONE = frozenset(
    [
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
_MANY = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_NAMED = frozenset(["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"])


@dataclass(frozen=True)
class SchemaLocation:
    """Where a schema lies.

    Attributes:
        base: What its references are relative to.
        draft: 4 to 2020.
        path: For messages.
    """

    base: str
    draft: int
    path: str

    def at(self, *steps: object) -> SchemaLocation:
        """Further inside."""
        return SchemaLocation(self.base, self.draft, "/".join([self.path, *map(str, steps)]))

    @property
    def replaces(self) -> bool:
        """Whether a reference stands for the whole schema it is in, so that its siblings say nothing."""
        return self.draft <= 7


class References:
    """Everything inside a document that a reference can name."""

    def __init__(self, document: Any) -> None:
        self.document = document
        self.start = SchemaLocation("", LATEST, "#")
        self._resources: dict[str, tuple[Any, SchemaLocation]] = {"": (document, self.start)}
        self._anchors: dict[tuple[str, str], tuple[Any, SchemaLocation]] = {}
        self._around: dict[int, SchemaLocation] = {}
        waiting = [(document, self.start)]
        while waiting:
            schema, around = waiting.pop()
            self._around[id(schema)] = around
            place = self._names(schema, around)
            waiting += [(each, place.at(*steps)) for steps, each in _inside(schema)]

    def _names(self, schema: Any, around: SchemaLocation) -> SchemaLocation:
        """Remember what the schema is called."""
        place = entered(schema, around)
        if isinstance(schema, Mapping) and not (place.replaces and "$ref" in schema):
            if place.base != around.base:
                self._resources.setdefault(place.base, (schema, around))
            words = ("$anchor", "$dynamicAnchor") if place.draft >= 2019 else ("$id",)
            for anchor in (schema.get(word) for word in words):
                if isinstance(anchor, str) and (place.draft >= 2019 or anchor.startswith("#")):
                    self._anchors.setdefault((place.base, anchor.removeprefix("#")), (schema, around))
        return place

    def find(self, reference: Any, place: SchemaLocation) -> tuple[Any, SchemaLocation]:
        """The schema a reference in a schema at `place` means, and where that lies."""
        if not isinstance(reference, str):
            raise ConstraintError(f"the JSON schema is wrong at {place.path}/$ref: a reference is a text")
        target = place.base + reference if reference.startswith("#") else urljoin(place.base, reference)
        uri, fragment = urldefrag(target)
        name = unquote(fragment)
        if uri not in self._resources:
            raise ConstraintError(
                f"the JSON schema refers to {reference!r} at {place.path}, which is not in it: put it under '$defs'"
            )
        if not name:
            return self._resources[uri]
        if not name.startswith("/"):
            if (uri, name) not in self._anchors:
                _nowhere(reference, place)
            return self._anchors[uri, name]
        schema, around = self._resources[uri]
        for step in name[1:].split("/"):
            around = entered(schema, around)
            schema = _step(schema, step.replace("~1", "/").replace("~0", "~"), reference, place)
            around = self._around.get(id(schema), around)
        return schema, SchemaLocation(around.base, around.draft, reference)


def entered(schema: Any, around: SchemaLocation) -> SchemaLocation:
    """What holds inside a schema: it may say its own draft and address.

    Raises:
        ConstraintError: For other drafts.
    """
    if not isinstance(schema, Mapping):
        return around
    draft, base, said = around.draft, around.base, schema.get("$schema")
    if isinstance(said, str):
        if said.rstrip("#/") not in _DRAFTS:
            raise ConstraintError(
                f"the JSON schema says {said!r} in '$schema' at {around.path}: drafts 4, 6, 7, 2019-09 and 2020-12 are "
                "supported"
            )
        draft = _DRAFTS[said.rstrip("#/")]
    name = schema.get("id" if draft == 4 else "$id")
    if isinstance(name, str) and not name.startswith("#") and not (draft <= 7 and "$ref" in schema):
        base = urldefrag(urljoin(base, name)).url
    return SchemaLocation(base, draft, around.path)


def _inside(schema: Any) -> Iterator[tuple[tuple[object, ...], Any]]:
    """The schemas directly inside a schema, and the steps there."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, Mapping):
            yield (keyword,), value
        elif keyword in _MANY and isinstance(value, list):
            yield from (((keyword, number), each) for number, each in enumerate(value))
        elif keyword in _NAMED and isinstance(value, Mapping):
            yield from (((keyword, name), each) for name, each in value.items())


def _step(value: Any, step: str, reference: str, place: SchemaLocation) -> Any:
    if isinstance(value, Mapping) and step in value:
        return value[step]
    if isinstance(value, list) and re.fullmatch(r"0|[1-9]\d{0,8}", step) and int(step) < len(value):
        return value[int(step)]
    _nowhere(reference, place)


def _nowhere(reference: str, place: SchemaLocation) -> NoReturn:
    raise ConstraintError(f"the JSON schema's reference {reference!r} at {place.path} points to nothing")
