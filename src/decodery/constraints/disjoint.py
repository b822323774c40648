"""Whether no value is valid under two JSON schemas, so that "exactly one" means "one of".

Proofs by type, literals, bounds and lengths, and by a property or item that one of them requires: a discriminating
`const`, mostly. What is not proved may still be so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

_ALL = frozenset(["array", "boolean", "null", "number", "object", "string"])
_MOST_STEPS = 300_000
"""Schemas and literals that are looked at for one document."""
_DEEPEST = 24

Schema = Any
"""As `prepare` gives it: a boolean or an object, whose references are resolved by name."""
Both = tuple[Schema, ...]
"""Schemas that all hold."""


class _TooMuch(Exception):
    """The steps are used up: what is not proved by then is not proved."""


class Prover:
    """Proofs over schemas of one document.

    Args:
        target: The schema that a reference's text names.
    """

    def __init__(self, target: Callable[[str], Schema]) -> None:
        self._target = target
        self._steps = 0

    def exclude_each_other(self, options: list[Schema], beside: Schema) -> bool:
        """Whether a value that is valid under `beside` is never valid under two of the options."""
        try:
            return all(self.disjoint((one, beside), (other, beside)) for one, other in combinations(options, 2))
        except _TooMuch:
            return False

    def disjoint(self, one: Both, other: Both, depth: int = 0) -> bool:
        """Whether no value is valid under all of `one` and all of `other`."""
        if depth > _DEEPEST:
            return False
        first, second = _Facts(self._parts(one)), _Facts(self._parts(other))
        if first.exclude(second) or self._inside(first, second, depth):
            return True
        for facts, rest in ((first, second), (second, first)):
            for index, some in facts.choices():
                left = (*facts.parts[:index], *facts.parts[index + 1 :])
                without = {key: value for key, value in facts.parts[index].items() if value is not some}
                if all(self.disjoint((*left, without, option), rest.parts, depth + 1) for option in some):
                    return True
        return False

    def _inside(self, first: _Facts, second: _Facts, depth: int) -> bool:
        """Whether they differ in a property or an item that a value of both must have."""
        common = first.types & second.types
        if common == {"object"}:
            keys = {key: None for facts in (first, second) for key in facts.required}
            return any(self.disjoint(first.member(key), second.member(key), depth + 1) for key in keys)
        if common == {"array"}:
            count = min(8, max(first.most("minItems", 0), second.most("minItems", 0)))
            return any(self.disjoint(first.item(n), second.item(n), depth + 1) for n in range(int(count)))
        return False

    def _parts(self, schemas: Both) -> tuple[Any, ...]:
        """What must hold, one after the other, with references and `allOf` opened."""
        found: list[Any] = []
        waiting, seen = list(schemas), set()
        while waiting:
            schema = waiting.pop(0)
            self._steps += 1 if isinstance(schema, bool) else 1 + len(schema.get("enum", ()))
            if self._steps > _MOST_STEPS:
                raise _TooMuch
            if isinstance(schema, bool):
                found += [{"enum": []}] * (not schema)
                continue
            waiting += schema.get("allOf", ())
            if "$ref" in schema and schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                waiting.append(self._target(schema["$ref"]))
            found.append({key: value for key, value in schema.items() if key not in ("allOf", "$ref")})
        return tuple(found)


class _Facts:
    """What schemas that all hold say of a value."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self.literals: dict[Any, Any] | None = None
        types = _ALL
        for part in parts:
            types &= _types(part)
            for literals in ([part["const"]] if "const" in part else None, part.get("enum")):
                if literals is not None:
                    named = {_name(value): value for value in literals}
                    known = named if self.literals is None else self.literals
                    self.literals = {name: value for name, value in named.items() if name in known}
        if self.literals is not None:
            types &= {_type(value) for value in self.literals.values()}
        self.types = types

    @property
    def required(self) -> Iterator[str]:
        return (key for part in self.parts for key in part.get("required", ()))

    def choices(self) -> Iterator[tuple[int, list[Schema]]]:
        for index, part in enumerate(self.parts):
            yield from ((index, part[word]) for word in ("anyOf", "oneOf") if word in part)

    def most(self, word: str, default: float) -> float:
        return max((part[word] for part in self.parts if word in part), default=default)

    def least(self, word: str) -> float:
        return min((part[word] for part in self.parts if word in part), default=math.inf)

    def member(self, key: str) -> Both:
        """What holds for a property, as far as it is certain."""
        found = []
        for part in self.parts:
            if key in part.get("properties", {}):
                found.append(part["properties"][key])
            elif not part.get("patternProperties"):
                found.append(part.get("additionalProperties", True))
        return tuple(found)

    def item(self, number: int) -> Both:
        found = []
        for part in self.parts:
            first = part.get("prefixItems", ())
            found.append(first[number] if number < len(first) else part.get("items", True))
        return tuple(found)

    def exclude(self, other: _Facts) -> bool:
        """Whether type, literals, bounds or lengths leave nothing in common."""
        common = self.types & other.types
        if not common or self._refuse_literals(other) or other._refuse_literals(self):
            return True
        return all(self._apart(other, kind) or other._apart(self, kind) for kind in common)

    def _refuse_literals(self, other: _Facts) -> bool:
        if self.literals is None:
            return False
        if other.literals is not None:
            return self.literals.keys().isdisjoint(other.literals)
        shortest, longest = other.most("minLength", 0), other.least("maxLength")
        low, high = other.most("minimum", -math.inf), other.least("maximum")
        for value in self.literals.values():
            kind = _type(value)
            too_long_or_short = kind == "string" and not shortest <= len(value) <= longest
            too_large_or_small = kind == "number" and not low <= value <= high
            if kind in other.types and not too_long_or_short and not too_large_or_small:
                return False
        return True

    def _apart(self, other: _Facts, kind: str) -> bool:
        """Whether all of one's are below the other's."""
        if kind not in _MEASURES:
            return False
        low, high = _MEASURES[kind]
        top, bottom = self.least(high), other.most(low, -math.inf)
        if kind != "number":
            return top < bottom
        below, above = self.least("exclusiveMaximum"), other.most("exclusiveMinimum", -math.inf)
        return top < bottom or top <= above or below <= bottom or below <= above


_MEASURES = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


def _types(part: Mapping[str, Any]) -> frozenset[str]:
    named = part.get("type", _ALL)
    return frozenset("number" if name == "integer" else name for name in ([named] if isinstance(named, str) else named))


def _type(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object"), (type(None), "null")):
        if isinstance(value, kind):
            return name
    return "number"


def _name(value: Any) -> Any:
    """What two JSON values share where they are equal, to be found by; true is not 1, but 1.0 is."""
    if isinstance(value, list):
        return "array", tuple(map(_name, value))
    if isinstance(value, dict):
        return "object", frozenset((key, _name(each)) for key, each in value.items())
    return _type(value), value
