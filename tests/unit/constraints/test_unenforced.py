"""What a mask leaves out of a schema is checked when a text is finished, and the result says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

import decodery as dc
from decodery.constraints import JSONSchema, ToolCalls
from decodery.constraints.pattern import Chars, parse
from decodery.core.errors import ConstraintError, SettingsError
from languages import BYTES, accepts

COLOURS = {
    "type": "array",
    "items": {"enum": ["red", "blue", "green"]},
    "minItems": 2,
    "maxItems": 2,
    "uniqueItems": True,
}
LEFT: dict[str, tuple[Any, str, str]] = {
    "uniqueItems": (COLOURS, '["red","blue"]', '["red","red"]'),
    "not": ({"type": "string", "not": {"const": "no"}}, '"yes"', '"no"'),
    "dependencies": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "dependencies": {"a": ["b"]},
            "additionalProperties": False,
        },
        '{"a":1,"b":2}',
        '{"a":1}',
    ),
    "pattern": ({"type": "string", "pattern": "^(?=a)\\w+$"}, '"ab"', '"b"'),
    "minProperties": ({"type": "object", "minProperties": 2}, '{"a":1,"b":2}', '{"a":1}'),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, "3", "7"),
}


@pytest.mark.parametrize("keyword", LEFT)
def test_a_keyword_is_refused_or_left_to_a_check(keyword: str) -> None:
    schema, good, bad = LEFT[keyword]
    with pytest.raises(ConstraintError):
        JSONSchema(schema).compile(BYTES)
    constraint = JSONSchema(schema, "compact", unenforced="check").compile(BYTES)
    assert constraint.after is not None and [each.split()[0] for each in constraint.after.unenforced] == [keyword]
    for text, violated in ((good, False), (bad, True)):
        assert accepts(constraint, text) and (constraint.after.violation(text) is not None) == violated


def test_formats_are_ignored_where_that_is_asked_for_and_listed() -> None:
    schema = {"type": "string", "format": "colour"}
    with pytest.raises(ConstraintError, match=r"'colour' at #.*unknown_formats=ignore"):
        JSONSchema(schema, unenforced="check").compile(BYTES)
    constraint = JSONSchema(schema, unknown_formats="ignore").compile(BYTES)
    assert constraint.after is not None and constraint.after.ignored == ("colour at #",)
    assert JSONSchema({"type": "string"}, unenforced="check").compile(BYTES).after is None


def test_what_cannot_be_chosen_is_not_advised() -> None:
    with pytest.raises(ConstraintError) as refused:
        ToolCalls([{"name": "f", "parameters": {"not": {"required": ["a"]}}}]).compile(BYTES)
    assert "unenforced" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"unenforced": "maybe"}, {"unknown_formats": "check"}, {"max_tries": 0}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(settings))):
        JSONSchema(True, **settings)


@pytest.mark.integration
def test_texts_are_written_anew_until_one_passes() -> None:
    lm = dc.load("smollm2")
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    given: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_new_tokens": 40}
    constraint = JSONSchema(schema, "compact", unenforced="check", max_tries=3)
    # Three different items out of two cannot be: every try fails, and the last one says so.
    out = lm.generate("Numbers:", constraint=constraint, **given)
    assert out.check is not None and out.check.tries == 3 and "non-unique" in str(out.check.violation)
    possible = JSONSchema(schema | {"items": {"enum": [1, 2, 3]}}, "compact", unenforced="check", max_tries=50)
    found = [lm.generate("Numbers:", constraint=possible, **given | {"seed": seed}) for seed in range(4)]
    assert all(each.check is not None and each.check.violation is None for each in found)
    assert all(len(set(json.loads(each.text))) == 3 for each in found)
    assert max(each.check.tries for each in found if each.check is not None) > 1
    # Greedy decoding would repeat itself, so further tries are drawn.
    greedy = lm.generate("Numbers: [1,1,1]", constraint=possible, max_new_tokens=40)
    assert greedy.check is not None and greedy.check.violation is None
    assert greedy.to_dict()["check"]["unenforced"] == ("uniqueItems at #",)


def _matches(pattern: str, text: str) -> bool:
    return accepts(dc.constraints.Regex(pattern).compile(BYTES), text)


def test_case_does_not_count_after_its_flag() -> None:
    assert _matches("(?i)stop[a-c]", "StOpB") and not _matches("(?i)stop[a-c]", "StOpD")
    assert _matches("x(?i:y)z", "xYz") and not _matches("x(?i:y)z", "XYz") and not _matches("x(?i:y)z", "xYZ")
    assert not _matches("(?i)[^q]", "Q") and _matches("(?i)é", "É") and not _matches("stop", "Stop")


def test_classes_stay_what_they_are_where_case_does_not_count() -> None:
    assert parse("(?i)\\w") == parse("\\w")
    node = parse("(?i)[x\\d]")
    assert node.parts == (Chars(((0x30, 0x39), (0x58, 0x58), (0x78, 0x78))),)  # type: ignore[union-attr]
    with pytest.raises(ConstraintError, match="property where case does not count"):
        parse("(?i)\\p{Lu}")
    with pytest.raises(ConstraintError, match="flag"):
        parse("(?m)a")


@pytest.mark.integration
def test_every_text_of_a_call_is_checked_and_keeps_its_cache() -> None:
    lm = dc.load("smollm2")
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    constraint = JSONSchema(schema, "compact", unenforced="check", max_tries=3)
    # Texts end while others are written anew: none of them goes unchecked.
    given: dict[str, Any] = {"constraint": constraint, "temperature": 1.0, "max_new_tokens": 30, "return_cache": True}
    outputs = [*lm.generate("Numbers:", n=3, **given), *lm.generate(iter(["Numbers:", "More:"]), **given)]
    assert [each.check.tries for each in outputs if each.check is not None] == [3] * 5
    assert all(each.check is not None and each.check.passed is False and each.kept is not None for each in outputs)
    # What failed was spent, too.
    assert all(each.trace.ledger.counts["discarded"] == 2 for each in outputs)
    assert all(each.trace.ledger.passes["model"] > each.trace.passes for each in outputs)
    cut = lm.generate("Numbers:", constraint=constraint, max_new_tokens=1)
    assert cut.check is not None and cut.check.passed is None


def test_patterns_that_the_check_could_not_read_are_refused_before_a_text() -> None:
    with pytest.raises(ConstraintError, match=r"Python's re, which does not read the pattern"):
        JSONSchema({"type": "string", "pattern": "^(?=a)\\p{L}+$"}, unenforced="check").compile(BYTES)
