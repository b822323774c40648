"""Schemas and grammars without a text are refused as such, and those with one are not."""

from __future__ import annotations

from typing import Any

import pytest

from decodery.constraints import Grammar, JSONSchema
from decodery.constraints.inhabited import require_text_of_grammar
from decodery.core.errors import ConstraintError
from languages import BYTES, accepts

ENDLESS: dict[str, Any] = {
    "a required property": {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
    "an item": {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
    "a first item": {"type": "array", "minItems": 2, "prefixItems": [True, {"$ref": "#"}]},
    "through others": {
        "$defs": {
            "a": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/$defs/b"}}},
            "b": {"anyOf": [{"allOf": [True, {"$ref": "#/$defs/a"}]}, False]},
        },
        "$ref": "#/$defs/a",
    },
    "an additional property": {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
}
ENDING: dict[str, tuple[Any, str]] = {
    "an optional property": ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a":{}}'),
    "another type": ({"type": ["object", "null"], "required": ["a"], "properties": {"a": {"$ref": "#"}}}, '{"a":null}'),
    "an alternative": (
        {"type": "object", "required": ["a"], "properties": {"a": {"anyOf": [{"$ref": "#"}, {"const": 1}]}}},
        '{"a":{"a":1}}',
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_whose_values_would_be_endless_is_refused(name: str) -> None:
    with pytest.raises(ConstraintError, match="allows no text at all"):
        JSONSchema(ENDLESS[name]).compile(BYTES)


@pytest.mark.parametrize("name", ENDING)
def test_a_schema_with_a_finite_value_is_not(name: str) -> None:
    schema, value = ENDING[name]
    assert accepts(JSONSchema(schema, "compact").compile(BYTES), value)


@pytest.mark.parametrize(
    "rules",
    [
        'start: start "a"',
        'start: a\na: "x" b\nb: "y" a',
        'start: b{2}\nb: b "x"',
        'start: "a" b+\nb: "(" b ")"',
        'start: ("a" | x) y // not: "y"\nx: "x"\ny[max_tokens=3]: [x] y',
    ],
)
def test_a_grammar_whose_rules_never_end_is_refused(rules: str) -> None:
    with pytest.raises(ConstraintError, match=r"the grammar allows no text at all: every way through .*start"):
        Grammar(rules).compile(BYTES)


@pytest.mark.parametrize(
    "rules",
    [
        'start: "a" start | "b"',
        'start: b{0,3} "x"\nb: b',
        'start: b~0..3 "x"\nb: b',
        'start: a ("," a)*\na: /x+/ | %json {"const": "start: start"}',
        "start: WORD\n%import common.WORD",
        'start: "a".."z" [start]',
        '?start: x -> y\n  | z // c\nx: x "x"\nz: "1"i',
    ],
)
def test_a_grammar_with_a_text_is_not(rules: str) -> None:
    require_text_of_grammar(rules)


def test_looking_through_rules_is_bounded() -> None:
    count = 5_000
    chain = "\n".join(f"r{number}: r{number - 1}" for number in range(1, count))
    # No rule has a text; what is beyond the bound is left to the engine.
    require_text_of_grammar(f"start: r0\n{chain}\nr0: r{count - 1} | " + "| ".join(["start"] * 200_000))
