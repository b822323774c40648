"""Schemas in the engine's form: nothing of them is lost on the way, and what would be is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decodery.constraints import JSONSchema
from decodery.constraints.schema import prepare
from decodery.core.errors import ConstraintError
from languages import BYTES, accepts
from random_schemas import is_valid, validator

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
WHOLE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}, "required": ["kind"]}
PETS = {"$defs": {"cat": CAT, "dog": DOG, "again": {"$ref": "#/$defs/cat"}}}
TREE = {
    "$defs": {
        "leaf": {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]},
        "node": {
            "type": "object",
            "properties": {"v": {"type": "string"}, "next": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#"}]}},
            "required": ["v"],
        },
    },
    "$ref": "#/$defs/node",
}
SEEN: dict[str, tuple[Any, list[str], list[str]]] = {
    "a reference to an unknown keyword": ({"shared": WHOLE, "$ref": "#/shared"}, ['{"a":1}'], ["1", "{}", '{"b":1}']),
    "a reference to an annotation": ({"default": WHOLE, "$ref": "#/default"}, ['{"a":1}'], ["1", "{}", "null"]),
    "a reference into examples": ({"examples": [1, WHOLE], "$ref": "#/examples/1"}, ['{"a":1}'], ["1", "{}"]),
    "a schema beside others it holds": (
        {"shared": {"type": "string", "inner": {"type": "integer"}}, "items": {"$ref": "#/shared/inner"}},
        ["[1]"],
        ['["a"]'],
    ),
    "escaped names": ({"$defs": {"a/b~c%d": {"enum": [7]}}, "$ref": "#/$defs/a~1b~0c%25d"}, ["7"], ["8"]),
    "an anchor": ({"$defs": {"x": {"$anchor": "here", "enum": [7]}}, "$ref": "#here"}, ["7"], ["8"]),
    "an old anchor": (
        {**DRAFT_7, "definitions": {"x": {"$id": "#h", "enum": [7]}}, "items": {"$ref": "#h"}},
        ["[7]"],
        ["[8]"],
    ),
    "an address": (
        {
            "$id": "http://a.example/root.json",
            "$defs": {"x": {"$id": "b/x.json", "$defs": {"y": {"enum": [7]}}, "items": {"$ref": "#/$defs/y"}}},
            "properties": {"p": {"$ref": "b/x.json"}, "q": {"$ref": "http://a.example/b/x.json#/$defs/y"}},
        },
        ['{"p":[7],"q":7}'],
        ['{"p":[8]}', '{"q":8}'],
    ),
    "itself": ({"type": "array", "items": {"$ref": "#"}}, ["[[],[[]]]"], ["[1]"]),
    "siblings of a reference": ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3}, ["3"], ["2"]),
    "siblings of an old reference": (
        {**DRAFT_7, "definitions": {"x": {"type": "integer"}}, "items": {"$ref": "#/definitions/x", "minimum": 3}},
        ["[2]"],
        ['["a"]'],
    ),
    "additional items beside first ones": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False},
        ["[1]", '[1,"a"]'],
        ['["a"]'],
    ),
    "additional items behind allOf": (
        {**DRAFT_7, "type": "array", "items": [{"type": "integer"}], "allOf": [True], "additionalItems": False},
        ["[1]"],
        ["[1,1]", '["a"]'],
    ),
    "two patterns that are one": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^(?:a)": {"minimum": 3}}},
        ['{"a":3}'],
        ['{"a":2}'],
    ),
    "above a number": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.5"], ["0", "0.0", "-0"]),
    "above 3": ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5, "type": "number"}, ["3.25"], ["3", "3.0", "3.5"]),
    "below a number": ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.25"], ["0", "-0", "-0.0"]),
    "below -3": ({"type": "number", "exclusiveMinimum": -3.5, "exclusiveMaximum": -3}, ["-3.25"], ["-3", "-3.5"]),
    "between two schemas": ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}], "type": "number"}, ["0.5"], ["0"]),
    "above, in draft 4": (
        {**DRAFT_4, "type": "number", "minimum": 2, "allOf": [{}], "exclusiveMinimum": True},
        ["2.5", "3"],
        ["2", "2.0"],
    ),
    "above 2^53": ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53)]),
    "a large literal": ({"enum": [2**60, -(2**53) - 2, 1e23]}, [str(2**60), str(-(2**53) - 2), "1" + "0" * 23], ["1"]),
    "one of some references": (
        {**PETS, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
        ['{"kind":"cat","lives":9}'],
        ['{"kind":"cow"}', "{}", '{"kind":"dog","name":1}'],
    ),
    "one of some types": (
        {
            "$defs": {"a": {"type": ["string", "null"]}, "b": {"type": "integer"}},
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        ['"x"', "1", "null"],
        ["[]", "true"],
    ),
    "one of some ranges": ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 4}]}, ["3", "4"], ['"a"']),
    "one of some recursive schemas": (
        TREE,
        ['{"v":"a","next":{"v":1}}', '{"v":"a","next":{"v":"b"}}'],
        ['{"v":1}', '{"v":"a","next":{}}'],
    ),
    "one of them beside any of others": (
        {"anyOf": [{"const": 1}, {"const": "a"}], "oneOf": [{"type": "string"}, {"type": "integer"}]},
        ["1", '"a"'],
        ["2", '"b"'],
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_everything_a_schema_says_is_enforced(name: str) -> None:
    schema, valid, invalid = SEEN[name]
    constraint, judge = JSONSchema(schema).compile(BYTES), validator(schema)
    for text in valid:
        assert is_valid(judge, text) and accepts(constraint, text), text
    for text in invalid:
        assert not is_valid(judge, text) and not accepts(constraint, text), text


REFUSED: dict[str, Any] = {
    "draft-03": {"$schema": "http://json-schema.org/draft-03/schema#", "type": "string", "divisibleBy": 2},
    "says 'http://example.com/meta' in '\\$schema'": {"$schema": "http://example.com/meta"},
    "#/properties/a/required": {"properties": {"a": {"type": "string", "required": True}}},
    "'\\$dynamicRef' at #/shared/x": {"shared": {"x": {"$dynamicRef": "#a"}}, "$ref": "#/shared/x"},
    "'uniqueItems' at #/default": {"default": {"uniqueItems": True}, "items": {"$ref": "#/default"}},
    "number at #/const": {"const": 2**53 + 1},
    "number at #/items/enum": {"items": {"enum": ["a", {"b": [2**64 + 1]}]}},
    "common multiple": {"allOf": [{"multipleOf": 70001}, {"multipleOf": 70003}]},
    "points to nothing": {"$ref": "#/$defs/a"},
    "refers to itself alone": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "'oneOf'": {**PETS, "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/again"}]},
    "exclude each other": {
        **DRAFT_7,
        "definitions": {"x": {"type": "integer"}},
        "oneOf": [{"$ref": "#/definitions/x", "type": "string"}, {"$ref": "#/definitions/x"}],
    },
    "only where its options": {"oneOf": [{"required": ["a"]}, {"type": "object", "required": ["b"]}]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_be_weaker_is_refused(reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        JSONSchema(REFUSED[reason]).compile(BYTES)


def test_a_union_of_many_is_told_apart_by_its_tag() -> None:
    options = [
        {"type": "object", "properties": {"tag": {"const": f"t{n}"}, "x": {"enum": [n]}}, "required": ["tag", "x"]}
        for n in range(60)
    ]
    schema = {"$defs": dict(zip(map(str, range(60)), options, strict=True))}
    schema["oneOf"] = [{"$ref": f"#/$defs/{n}"} for n in range(60)]
    constraint = JSONSchema(json.dumps(schema)).compile(BYTES)
    assert accepts(constraint, '{"tag":"t41","x":41}') and not accepts(constraint, '{"tag":"t41","x":40}')


def test_long_lists_of_literals_are_told_apart_without_comparing_each_with_each() -> None:
    halves = [{"enum": [[n, True] for n in range(10_000)]}, {"enum": [[n, 1] for n in range(10_000)]}]
    assert [*prepare({"oneOf": halves})] == ["anyOf"]
    # Every pair looks at all that holds beside it: what is not proved within the limit is left to the engine.
    many = {"enum": [*range(30_000)], "oneOf": [{"const": n} for n in range(2_000)]}
    assert [*prepare(many)] == ["enum", "oneOf"]
