"""Calls of tools: free until a mark, bound after it, whatever tokens the mark is cut into."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from decodery.constraints.tool_calls import MARK, FunctionCall, ToolCalls, ToolCallsConstraint, read_calls
from decodery.core.errors import ConstraintError
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.testing import check_constraint

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "parameters": CITY}, {"name": "now"}]


def make_vocabulary(*pieces: bytes) -> Vocabulary:
    """A token per byte, these ones, and an end."""
    known = [bytes([byte]) for byte in range(256)] + [*pieces, b"</s>"]
    end = len(known) - 1
    return Vocabulary(known, frozenset({end}), (end,), lambda text: list(text.encode()))


BYTES = make_vocabulary()


def test_texts_of_required_calls_keep_the_laws_and_their_schemas() -> None:
    constraint = ToolCalls(TOOLS, required=True, several=False).compile(BYTES)
    walks = check_constraint(constraint, BYTES.eos_ids, walks=12, length=120)
    called = set()
    for walk in walks:
        if walk[-1] not in BYTES.eos_ids:
            continue
        said, (call,) = read_calls(BYTES.bytes_of(walk).decode())
        called.add(call.name)
        assert said == ""
        if call.name == "weather":
            jsonschema.validate(json.loads(call.arguments), CITY)
        else:
            assert json.loads(call.arguments) == {}
    assert called == {"weather", "now"}


def advanced(constraint: ToolCallsConstraint, text: bytes) -> Any:
    state = constraint.init([])
    for byte in text:
        assert constraint.allowed(state)[byte] and constraint.accepts(state, byte), (text, byte)
        state = constraint.advance(state, byte)
    return state


def test_a_text_is_free_until_a_mark() -> None:
    constraint = ToolCalls(TOOLS).compile(BYTES)
    assert isinstance(constraint, ToolCallsConstraint)
    for text in (b"", b"<tool", b"<tool_cal>", b"<<tool_call", b"a < b > c", b"\xff<tool_\xff"):
        state = advanced(constraint, text)
        assert constraint.idle(state) and constraint.allowed(state).all() and constraint.is_complete(state)
    state = advanced(constraint, b"let me see <<tool_<tool_call>")
    assert not constraint.idle(state) and not constraint.is_complete(state)
    assert np.flatnonzero(constraint.allowed(state)).tolist() == [ord("\n")]
    call = b'\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    ended = advanced(constraint, b"x" + MARK.encode() + call)
    assert constraint.is_complete(ended)
    assert sorted(np.flatnonzero(constraint.allowed(ended))) == [ord("\n"), *BYTES.eos_ids]
    twice = advanced(constraint, MARK.encode() + call + b"\n" + MARK.encode() + call)
    assert constraint.is_complete(twice)
    once = ToolCalls(TOOLS, several=False).compile(BYTES)
    assert isinstance(once, ToolCallsConstraint)
    over = advanced(once, MARK.encode() + call)
    assert np.flatnonzero(once.allowed(over)).tolist() == [*BYTES.eos_ids]


def test_tokens_that_would_pass_a_mark_unseen_are_not_allowed_there() -> None:
    vocabulary = make_vocabulary(b"call>{", b"<tool_call>", b"x<tool_call>y")
    constraint = ToolCalls(TOOLS).compile(vocabulary)
    assert isinstance(constraint, ToolCallsConstraint)
    inside, whole, around = 256, 257, 258
    state = advanced(constraint, b"<tool_")
    assert not constraint.idle(state) and not constraint.allowed(state)[inside]
    state = advanced(constraint, b"free")
    assert constraint.allowed(state)[inside] and not constraint.allowed(state)[around]
    state = constraint.advance(state, whole)
    assert np.flatnonzero(constraint.allowed(state)).tolist() == [ord("\n")]


def call(name: str, arguments: str = "{}") -> str:
    return f'{MARK}\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CUT = call("a").removesuffix("_call>")


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("no call", "no call", []),
        (call("a", '{"x": "</tool_call>"}'), "", [("a", '{"x": "</tool_call>"}')]),
        (f"so {call('a')}\n{call('b')}", "so ", [("a", "{}"), ("b", "{}")]),
        (call("a")[:30], call("a")[:30], []),
        (CUT, CUT, []),
        ("<tool_call>\n[1]\n</tool_call>", "<tool_call>\n[1]\n</tool_call>", []),
    ],
)
def test_calls_are_read_whole_or_left_in_the_text(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read_calls(text) == (said, [FunctionCall(*call) for call in calls])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([], "1 to 128"),
        ("{", "not JSON"),
        ([{"name": "a b"}], "every tool has a name"),
        ([{"name": "a", "parameters": 3}], "no JSON schema"),
        ([{"name": "a", "parameters": {"properties": {"x": {"type": "what"}}}}], "cannot be enforced"),
    ],
)
def test_tools_that_are_none(tools: Any, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        ToolCalls(tools).compile(BYTES)
