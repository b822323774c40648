"""Random JSON schemas of every draft, values near them, and what the package `jsonschema` says of a value."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import jsonschema

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
NUMBERS = [-11, -3.5, -3, -1, -0.75, -0.5, 0, 0.125, 0.5, 0.75, 1, 1.5, 2, 3, 10, 100.25, 2**53, 2**53 + 1, 10**17 + 1]
STEPS = [1, 2, 3, 0.5, 0.25, 10, 7]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "abc",
    "é",
    "aé",
    "1",
    "12",
    "a b",
    '"',
    "\\",
    "a\nc",
    "2024-02-29",
    "2023-02-29",
    "1.2.3.4",
]
PATTERNS = ["^a", "b$", "^[ab]*$", "^.{1,2}$", r"^\d+$", "a|1", "^(a|b)c?$", "^é", "^x-"]
FORMATS = ["date", "ipv4", "ipv6", "uuid"]
CHECKER = jsonschema.FormatChecker(formats=[*FORMATS, "email"])
KEYS = ["a", "b", "c", "é", "x-a", "kind"]
PLACES = ["$defs", "definitions", "shared", "default", "examples", "x-parts", "title", "$vocabulary"]
"""Where schemas lie that references point to: where they belong, under names no draft knows, in annotations."""


class Maker:
    """One random schema of one draft."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.draft = self.chance.choice([*DRAFTS, 2020, 2020])
        self.targets: dict[str, Any] = {}
        self.schema = self._document()

    def _document(self) -> dict[str, Any]:
        lying: dict[str, dict[str, Any]] = {}
        names = ["one", "two", "a/b", "c~d", "e%f"]
        for number in range(self.chance.choice([0, 1, 1, 2])):
            place, name = self.chance.choice(PLACES), names.pop(self.chance.randrange(len(names)))
            spelled = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
            depth = self.chance.randrange(3)
            if depth == 0 and place not in ("$defs", "definitions") and place not in lying:
                self.targets[f"#/{place}"] = lying[place] = self.made(1)
            elif f"#/{place}" not in self.targets:
                inside = lying.setdefault(place, {})
                pointer = f"#/{place}/{spelled}"
                if depth == 2 and place not in ("$defs", "definitions"):
                    inside, pointer = inside.setdefault("group", {}), f"#/{place}/group/{spelled}"
                self.targets[pointer] = inside[name] = self.made(1)
                if place == "definitions" and self.chance.random() < 0.3:
                    self._anchor(inside[name], number)
        schema = self.made(0)
        for place, found in lying.items():
            if self.chance.random() < 0.5:
                schema = {place: found, **schema}
            else:
                schema[place] = found
        if self.draft != 2020 or self.chance.random() < 0.3:
            schema = {"$schema": DRAFTS[self.draft], **schema}
        return schema

    def _anchor(self, schema: dict[str, Any], number: int) -> None:
        if self.draft >= 2019:
            schema["$anchor"] = f"here{number}"
        elif self.draft > 4 and "$ref" not in schema:
            schema["$id"] = f"#here{number}"
        else:
            return
        self.targets[f"#here{number}"] = schema

    def made(self, depth: int) -> dict[str, Any]:
        """A schema that is an object."""
        chance = self.chance
        kinds = ["string", "number", "integer", "array", "object", "object", "literal", "bare", "types", "some"]
        kinds += ["some", *["reference"] * 3] if depth else ["object", "object", "array", "reference"]
        kind = chance.choice(kinds if depth < 3 else ["string", "number", "integer", "literal", "reference"])
        schema = getattr(self, f"_{kind}")(depth)
        if chance.random() < 0.12:
            schema = self._mixed(schema, self._bare(depth))
        if depth < 3 and chance.random() < 0.12:
            schema = self._mixed(schema, self._some(depth))
        if chance.random() < 0.03:
            schema[chance.choice(["uniqueItems", "not", "contains"])] = chance.choice([False, True])
        return schema

    def _mixed(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        both = {**one, **{key: value for key, value in other.items() if key not in one}}
        if self.draft != 2020 and not isinstance(both.get("items"), list):
            both.pop("additionalItems", None)
        items = list(both.items())
        if self.chance.random() < 0.5:
            self.chance.shuffle(items)
        return dict(items)

    def any(self, depth: int) -> Any:
        """A schema, perhaps a boolean where the draft has them."""
        if self.draft > 4 and self.chance.random() < 0.06:
            return self.chance.random() < 0.6
        return self.made(depth)

    def _some(self, depth: int) -> dict[str, Any]:
        keyword = self.chance.choice(["allOf", "anyOf", "oneOf", "oneOf"])
        return {keyword: [self.any(depth + 1) for _ in range(self.chance.choice([1, 2, 2, 3]))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        if not self.targets:
            return self._literal(depth)
        schema: dict[str, Any] = {"$ref": self.chance.choice([*self.targets])}
        return self._mixed(schema, self._bare(depth)) if self.chance.random() < 0.25 else schema

    def _literal(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        if self.draft > 4 and chance.random() < 0.4:
            return {"const": self.plain(chance.choice([0, 0, 1]))}
        return {"enum": [self.plain(chance.choice([0, 0, 1])) for _ in range(chance.choice([1, 2, 3]))]}

    def _types(self, depth: int) -> dict[str, Any]:
        names = ["string", "number", "integer", "array", "object", "null", "boolean"]
        return self._mixed({"type": self.chance.sample(names, 2)}, self._bare(depth))

    def _bare(self, depth: int) -> dict[str, Any]:
        """Keywords of one type without the type."""
        kinds = ["string", "number"] + ["array", "object"] * (depth < 3)
        schema = getattr(self, f"_{self.chance.choice(kinds)}")(depth)
        schema.pop("type", None)
        return schema

    def _string(self, depth: int) -> dict[str, Any]:
        chance, schema = self.chance, {"type": "string"}
        if chance.random() < 0.35:
            schema["pattern"] = chance.choice(PATTERNS)
        if chance.random() < 0.3:
            schema["minLength"] = chance.choice([0, 1, 2])
        if chance.random() < 0.3:
            schema["maxLength"] = chance.choice([0, 1, 2, 3])
        if chance.random() < 0.1:
            schema["format"] = chance.choice(FORMATS)
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        return {**self._number(depth), "type": "integer"}

    def _number(self, depth: int) -> dict[str, Any]:
        chance, schema = self.chance, {"type": "number"}
        low, high = sorted((chance.choice(NUMBERS), chance.choice(NUMBERS)))
        if chance.random() < 0.5:
            # Bounds in one unit interval are where spelling numbers is hardest.
            high = low + chance.choice([0.25, 0.5, 1])
        for name, exclusive, value in (("minimum", "exclusiveMinimum", low), ("maximum", "exclusiveMaximum", high)):
            kind = chance.randrange(3)
            if kind == 0:
                schema[name] = value
            elif kind == 1:
                schema |= {exclusive: value} if self.draft > 4 else {name: value, exclusive: True}
        if chance.random() < 0.15:
            schema["multipleOf"] = chance.choice(STEPS)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        chance, schema = self.chance, {"type": "array"}
        if chance.random() < 0.4:
            tuples = "prefixItems" if self.draft == 2020 else "items"
            schema[tuples] = [self.any(depth + 1) for _ in range(chance.choice([1, 2]))]
        rest = "items" if self.draft == 2020 or "items" not in schema else "additionalItems"
        if chance.random() < 0.5:
            schema[rest] = self.any(depth + 1)
        if self.draft == 2020 and chance.random() < 0.15:
            schema["additionalItems"] = False
        if chance.random() < 0.3:
            schema["minItems"] = chance.choice([0, 1, 2])
        if chance.random() < 0.3:
            schema["maxItems"] = chance.choice([0, 1, 2, 3])
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        chance, schema = self.chance, {"type": "object"}
        if chance.random() < 0.85:
            keys = chance.sample(KEYS, chance.choice([1, 2, 2, 3]))
            schema["properties"] = {key: self.any(depth + 1) for key in keys}
        if chance.random() < 0.2:
            schema["patternProperties"] = {chance.choice(PATTERNS): self.any(depth + 1)}
        if chance.random() < 0.5:
            closed = self.draft == 4 or chance.random() < 0.6
            schema["additionalProperties"] = False if closed else self.any(depth + 1)
        if chance.random() < 0.6:
            schema["required"] = chance.sample([*schema.get("properties", KEYS)], 1)
        if chance.random() < 0.1:
            schema["minProperties"] = 1
        if chance.random() < 0.1:
            schema["maxProperties"] = chance.choice([0, 1, 2])
        return schema

    def plain(self, depth: int) -> Any:
        """A value of no schema in particular."""
        chance = self.chance
        kind = chance.randrange(7 if depth else 5)
        if kind == 5:
            return [self.plain(depth - 1) for _ in range(chance.randrange(3))]
        if kind == 6:
            return {key: self.plain(depth - 1) for key in chance.sample(KEYS, chance.randrange(3))}
        return [None, chance.random() < 0.5, chance.choice(NUMBERS), chance.choice(TEXTS), chance.choice(NUMBERS)][kind]

    def value(self, schema: Any, depth: int = 0) -> Any:
        """A value that is likely to be near a schema."""
        chance = self.chance
        if isinstance(schema, bool) or depth > 5 or chance.random() < 0.06:
            return self.plain(1)
        if "$ref" in schema and chance.random() < 0.9:
            return self.value(self.targets[schema["$ref"]], depth + 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return chance.choice(schema["enum"])
        if some := [each for keyword in ("allOf", "anyOf", "oneOf") for each in schema.get(keyword, ())]:
            inner = chance.choice(some)
            if chance.random() < 0.4 and isinstance(inner, dict):
                schema = {**schema, **inner, "properties": schema.get("properties", {}) | inner.get("properties", {})}
                schema = {key: each for key, each in schema.items() if key not in ("allOf", "anyOf", "oneOf")}
            elif chance.random() < 0.7:
                return self.value(inner, depth + 1)
        kind = schema.get("type") or next((name for name, words in WORDS.items() if words & schema.keys()), None)
        kind = chance.choice(kind) if isinstance(kind, list) and kind else kind
        if kind in ("number", "integer"):
            return self._near(schema, kind)
        if kind == "string":
            return chance.choice(TEXTS)
        if kind == "array":
            prefix = schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else [])
            rest = schema.get("items", True) if not isinstance(schema.get("items"), list) else True
            count = max(schema.get("minItems", 0), chance.randrange(len(prefix) + 2))
            return [self.value(prefix[n] if n < len(prefix) else rest, depth + 1) for n in range(count)]
        if kind == "object":
            known = schema.get("properties", {})
            keys = [key for key in known if key in schema.get("required", ()) or chance.random() < 0.5]
            keys += [key for key in schema.get("required", ()) if key not in keys]
            keys += chance.sample(KEYS, 1) if chance.random() < 0.3 else []
            return {key: self.value(known.get(key, True), depth + 1) for key in keys}
        return {"null": None, "boolean": True}.get(kind, self.plain(1))

    def _near(self, schema: dict[str, Any], kind: str) -> Any:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        bounds = [schema[name] for name in names if isinstance(schema.get(name), int | float)]
        numbers = [value for value in bounds if not isinstance(value, bool)] or NUMBERS
        found = self.chance.choice(numbers) + self.chance.choice([0, 0, 0, 1, -1, 0.125, -0.125, 0.0625, 3])
        return int(found) if kind == "integer" or float(found).is_integer() else found


WORDS = {
    "string": {"pattern", "minLength", "maxLength", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"},
}


def validator(schema: Any) -> Any:
    """The package's validator of the schema's draft, formats included; numbers are decimals and compared exactly."""
    parsed = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    whole = kind.TYPE_CHECKER.redefine("integer", lambda _, value: not isinstance(value, bool) and _whole(value))
    return jsonschema.validators.extend(kind, type_checker=whole)(parsed, format_checker=CHECKER)


def is_valid(judge: Any, text: str) -> bool:
    """Whether a JSON text is valid, its numbers taken as they are written."""
    with localcontext(prec=400):
        return bool(judge.is_valid(json.loads(text, parse_float=_number)))


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def _whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, Decimal) and value == value.to_integral_value())


def orders(value: Any, most: int = 24) -> Iterator[str]:
    """A value as JSON texts, its properties in one order after the other: the engine writes them in its own."""
    return itertools.islice(_orders(value), most)


def _orders(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for items in itertools.product(*([*itertools.islice(_orders(each), 6)] for each in value)):
            yield f"[{','.join(items)}]"
    elif isinstance(value, dict):
        for keys in itertools.permutations(value):
            for items in itertools.product(*([*itertools.islice(_orders(value[key]), 6)] for key in keys)):
                pairs = (f"{json.dumps(key, ensure_ascii=False)}:{item}" for key, item in zip(keys, items, strict=True))
                yield f"{{{','.join(pairs)}}}"
    else:
        yield json.dumps(value, ensure_ascii=False)
