"""Calls of tools: a text that calls one does so in a form that can be read, with arguments its schema allows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decodery.core.errors import ConstraintError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

from .base import ConstraintSpec, require_text
from .engine import GrammarConstraint, GrammarState
from .json_schema import JSONSchema
from .lark import lark
from .schema import prepare

__all__ = ["FunctionCall", "read_calls"]

MARK, END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST_TOOLS = 128
_MOST_DIGITS = 308
"""Of integers: more are beyond the floats that JavaScript reads them as."""
_NOTHING = {"properties": {}, "additionalProperties": False}
_LAYOUT = {"whitespace_pattern": r"[ \n\r\t]{1,32}", "json_allowed_escapes": 'nrbtf\\"'}


@dataclass(frozen=True)
class FunctionCall:
    """A call of a tool.

    Attributes:
        arguments: JSON text of an object.
    """

    name: str
    arguments: str


@register(
    "tool-calls",
    guarantee="every call in a finished text names a tool and has arguments that are valid under its schema",
    texts=("tools", "answer"),
)
@dataclass(frozen=True)
class ToolCalls(ConstraintSpec):
    """Lets a text call tools, and write nothing that only looks like a call.

    A call is `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, with a line break after and before its marks.

    Attributes:
        tools: A list of {"name", "parameters"}, the latter a JSON schema of an object, or its text; without parameters
            a tool takes none.
        required: The text is calls from the first token on; else it is free until the first mark of a call, after which
            there are calls alone.
        several: Whether there may be more than one call.
        answer: A JSON schema, or its text, that a text without calls follows; None leaves it free.
    """

    tools: str | Sequence[Mapping[str, Any]]
    required: bool = False
    several: bool = True
    answer: str | Mapping[str, Any] | bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            text = self.tools if isinstance(self.tools, str) else json.dumps(self.tools, allow_nan=False)
            require_text("list of tools", text)
            tools = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConstraintError(f"the list of tools is not JSON: {error}") from error
        if not isinstance(tools, list) or not 0 < len(tools) <= _MOST_TOOLS:
            raise ConstraintError(f"tools are a list of 1 to {_MOST_TOOLS}")
        for tool in tools:
            if not (isinstance(tool, dict) and isinstance(tool.get("name"), str) and _NAME.fullmatch(tool["name"])):
                raise ConstraintError("every tool has a name of at most 64 letters, digits, and any of _ . -")
            if not isinstance(tool.get("parameters") or {}, dict):
                raise ConstraintError(f"the parameters of the tool {tool['name']} are no JSON schema of an object")
        object.__setattr__(self, "tools", text)
        if self.answer is not None:
            object.__setattr__(self, "answer", JSONSchema(self.answer).schema)

    def compile(self, vocabulary: Vocabulary) -> Constraint:
        assert isinstance(self.tools, str)
        heads, rules = [], []
        for number, tool in enumerate(json.loads(self.tools)):
            head = json.dumps(f'\n{{"name": "{tool["name"]}", "arguments": ')
            heads.append(f"{head} object{number}")
            rules.append(f"object{number}: %json {json.dumps(_schema(tool))}")
        more = f' ("\\n{MARK}" call)*' if self.several else ""
        rules.append(f'call: ({" | ".join(heads)}) "}}\\n{END}"')
        marked = self.required or self.answer is not None
        start = f"{json.dumps(MARK) if marked else ''} call{more}"
        if self.answer is not None and not self.required:
            assert isinstance(self.answer, str)
            start = f"{start} | answer"
            rules.append(f"answer: %json {json.dumps(_prepared(json.loads(self.answer)))}")
        rules.append(f"start: {start}")
        try:
            grammar = GrammarConstraint(vocabulary, lark("\n".join(rules), self.mode))
        except ConstraintError as error:
            raise ConstraintError(f"the parameters of the tools cannot be enforced: {error}") from error
        return grammar if marked else ToolCallsConstraint(vocabulary, grammar)


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, in the form the engine enforces in full."""
    try:
        return _prepared({**(tool.get("parameters") or _NOTHING), "type": "object"})
    except ConstraintError as error:
        raise ConstraintError(f"the parameters of the tool {tool['name']} cannot be enforced: {error}") from error


def _prepared(schema: Any) -> dict[str, Any]:
    """A schema in the form that the engine enforces in full."""
    prepared = prepare(schema)
    return {**({"allOf": [prepared]} if isinstance(prepared, bool) else prepared), "x-guidance": _LAYOUT}


def _whole(text: str) -> int | str:
    return int(text) if len(text) <= _MOST_DIGITS else text


def _finite(text: str) -> float | str:
    return found if math.isfinite(found := float(text)) else text


_READER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=str)
"""Of a model's arguments. Numbers that clients cannot read stay the texts that they are."""


def read_calls(text: str) -> tuple[str, list[FunctionCall]]:
    """What a text says before its first call, and its calls; one that is cut is left in the text, unread."""
    calls: list[FunctionCall] = []
    said, at = text, text.find(MARK)
    while at >= 0:
        try:
            found, end = _READER.raw_decode(text, at + len(MARK) + 1)
            name, arguments = found["name"], found["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if not text.startswith(f"\n{END}", end):
            break
        if not calls:
            said = text[:at]
        calls.append(FunctionCall(str(name), json.dumps(arguments, ensure_ascii=False)))
        at = text.find(MARK, end)
    return said, calls


@dataclass(frozen=True, slots=True)
class _ToolCallState:
    """tail: the last bytes of the text, while they may begin a mark; call: where the calls after one stand."""

    tail: bytes = b""
    call: GrammarState | None = None
    ended: bool = False


class ToolCallsConstraint(Constraint):
    """`ToolCalls` for one vocabulary: idle until a text's bytes are a mark, a grammar after it."""

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, ends=False)

    def __init__(self, vocabulary: Vocabulary, grammar: GrammarConstraint) -> None:
        self.vocabulary = vocabulary
        self._grammar = grammar
        self._all = np.ones(vocabulary.size, dtype=bool)
        self._ends = np.zeros(vocabulary.size, dtype=bool)
        self._ends[list(vocabulary.eos_ids)] = True
        mark = MARK.encode()
        # Tokens that would go on after a mark, unseen by the grammar; few vocabularies have one.
        self._beyond: dict[bytes, np.ndarray] = {}
        for length in range(len(mark)):
            rest = mark[length:]
            found = [number for number, piece in enumerate(vocabulary.pieces) if rest in piece and piece != rest]
            over = [number for number in found if _passes(mark[:length], vocabulary.pieces[number])]
            if over:
                mask = np.ones(vocabulary.size, dtype=bool)
                mask[over] = False
                self._beyond[mark[:length]] = mask

    def init(self, prompt: Sequence[int]) -> _ToolCallState:
        return _ToolCallState()

    def idle(self, state: _ToolCallState) -> bool:
        return state.call is None and not state.ended and state.tail not in self._beyond

    def allowed(self, state: _ToolCallState) -> np.ndarray:
        if state.ended:
            return self._ends
        if state.call is not None:
            return self._grammar.allowed(state.call)
        return self._beyond.get(state.tail, self._all)

    def advance(self, state: _ToolCallState, token: int) -> _ToolCallState:
        if state.call is not None:
            return _ToolCallState(call=self._grammar.advance(state.call, token))
        if state.ended or token in self.vocabulary.eos_ids:
            return _ToolCallState(ended=True)
        if token in self.vocabulary.special_ids:
            return state
        text, mark = state.tail + self.vocabulary.pieces[token], MARK.encode()
        if text.endswith(mark):
            return _ToolCallState(call=self._grammar.init([]))
        return _ToolCallState(_beginning(text, mark))

    def is_complete(self, state: _ToolCallState) -> bool:
        return state.call is None or self._grammar.is_complete(state.call)

    def completion(self, state: _ToolCallState, *, thorough: bool = False) -> list[int] | None:
        return [] if state.call is None else self._grammar.completion(state.call, thorough=thorough)

    def takes(self, state: _ToolCallState, tokens: Sequence[int]) -> bool:
        return state.call is None or self._grammar.takes(state.call, tokens)

    def accepts(self, state: _ToolCallState, token: int) -> bool:
        if state.call is not None:
            return self._grammar.accepts(state.call, token)
        return bool(self.allowed(state)[token])


def _beginning(text: bytes, mark: bytes) -> bytes:
    """The longest end of a text that begins a mark."""
    return next((mark[:n] for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), b"")


def _passes(tail: bytes, piece: bytes) -> bool:
    """Whether a piece after this tail holds a whole mark and does not end with it."""
    mark = MARK.encode()
    return mark in tail + piece and not (tail + piece).endswith(mark)
