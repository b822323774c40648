"""Objects that end: properties a schema does not list are not written, unless it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decodery.constraints import JSONSchema, ToolCalls
from decodery.core.errors import ConstraintError, SettingsError
from languages import BYTES, accepts
from random_schemas import is_valid, validator

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
FORMS: dict[str, tuple[Any, list[str], list[str]]] = {
    "listed": (A, ['{"a":1}'], ['{"a":1,"z":1}']),
    "nothing listed": ({"type": "object"}, ['{"z":1}', "{}"], []),
    "an empty list": ({"type": "object", "properties": {}}, ["{}"], ['{"z":1}']),
    "open by its schema": (A | {"additionalProperties": True}, ['{"a":1,"z":1}'], []),
    "open for integers": (A | {"additionalProperties": {"type": "integer"}}, ['{"a":1,"z":1}'], ['{"a":1,"z":"z"}']),
    "required and not listed": (A | {"required": ["a", "c"]}, ['{"a":1,"c":[]}'], ['{"a":1}', '{"a":1,"c":[],"z":1}']),
    "more than it lists": (A | {"minProperties": 2}, ['{"a":1,"z":1}'], ['{"a":1}']),
    "patterns": (A | {"patternProperties": {"^x": {"type": "integer"}}}, ['{"a":1,"x":1}', '{"a":1,"z":"z"}'], []),
    "two parts": ({"allOf": [A, B]}, ['{"a":1,"b":2}', '{"a":1}'], ['{"b":2}', '{"a":1,"b":2,"z":1}']),
    "a part and its own": (B | {"allOf": [A]}, ['{"b":2,"a":1}'], ['{"b":2,"a":1,"z":1}']),
    "a single part": ({"allOf": [A]}, ['{"a":1}'], ['{"a":1,"z":1}']),
    "alternatives": ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"z":1}', '{"z":1}']),
    "alternatives with something in common": (
        {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"], "anyOf": [A, B]},
        ['{"k":0,"a":1}', '{"k":0,"b":1}'],
        ['{"k":0,"z":1}', '{"k":0,"a":1,"z":1}'],
    ),
    "an object as a part and alone": (
        {"$defs": {"a": A}, "properties": {"p": {"$ref": "#/$defs/a"}, "q": {"$ref": "#/$defs/a", **B}}},
        ['{"p":{"a":1},"q":{"a":1,"b":2}}'],
        ['{"p":{"a":1,"b":2}}', '{"q":{"a":1,"b":2,"z":1}}'],
    ),
    "inside": (
        {"type": "array", "items": {"properties": {"x": A}, "type": "object"}},
        ['[{"x":{"a":1}}]'],
        ['[{"x":{"a":1,"z":1}}]', '[{"z":1}]'],
    ),
    "a tree": (
        {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "type": "object"},
        ['{"v":1,"next":{"v":2}}'],
        ['{"next":{"z":1}}'],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_object_has_the_properties_that_its_schemas_list(form: str) -> None:
    schema, right, wrong = FORMS[form]
    closed = JSONSchema(schema, whitespace="compact").compile(BYTES)
    judge = validator(schema)
    for text in right:
        assert accepts(closed, text), text
        assert is_valid(judge, text)
    for text in wrong:
        assert not accepts(closed, text), text


def test_open_objects_have_any_other_property() -> None:
    language = JSONSchema(A, whitespace="compact", additional_properties="open").compile(BYTES)
    assert accepts(language, '{"a":1,"z":1}')
    with pytest.raises(SettingsError, match="closed or open"):
        JSONSchema(A, additional_properties="shut")  # type: ignore[arg-type]


def test_arguments_of_tools_are_closed() -> None:
    calls = ToolCalls([{"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}], required=True)
    language = calls.compile(BYTES)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert accepts(language, call % json.dumps({"a": 1}))
    assert not accepts(language, call % json.dumps({"z": 1}))


def test_closing_every_part_by_itself_would_allow_nothing() -> None:
    parts = [{**part, "additionalProperties": False} for part in (A, B)]
    with pytest.raises(ConstraintError, match="cannot be enforced"):
        JSONSchema({"allOf": parts}, whitespace="compact").compile(BYTES)
