"""Limit on the reasoning part before an answer, with another constraint on the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from decodery.core.errors import ConstraintError, SettingsError
from decodery.core.registry import register, resolve
from decodery.core.requirements import Requirements
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

from .base import ConstraintSpec
from .spelling import end_mask

_PROMPT = 16
"""Number of last prompt tokens that are searched for the mark."""
_LONGEST = 64
"""Maximum bytes of a mark: each of its prefixes needs a mask of the vocabulary, and requests may set marks."""


@register(
    "reasoning",
    guarantee="at most `budget` tokens of reasoning, after which the text follows `answer`",
    requirements=("a model that marks its reasoning",),
    texts=("begin", "end"),
)
@dataclass(frozen=True)
class Reasoning(ConstraintSpec):
    """Limits the reasoning part of a text, and applies another constraint to the answer after it.

    A reasoning part starts at the beginning of the text, or the prompt ends with its begin mark. A text without one
    follows `answer` from its first token. After `budget` tokens the end mark is written.

    Attributes:
        begin: The mark before the reasoning part.
        end: The mark after the reasoning part.
        budget: Maximum number of tokens of the reasoning part; None for no limit.
        answer: The constraint on the answer; None for no constraint.
    """

    begin: str = "<think>"
    end: str = "</think>"
    budget: int | None = None
    answer: ConstraintSpec | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.begin or not self.end:
            raise SettingsError("a reasoning part has a mark at its begin and at its end: give both as texts")
        if (most := max(len(self.begin.encode()), len(self.end.encode()))) > _LONGEST:
            raise SettingsError(
                f"a mark of a reasoning part has {most} bytes, and may have {_LONGEST}: give a shorter one"
            )
        if self.budget is not None and self.budget < 0:
            raise SettingsError(f"the budget of a reasoning part is 0 tokens or more, not {self.budget}")
        if self.answer is not None:
            object.__setattr__(self, "answer", resolve("constraint", self.answer))

    def compile(self, vocabulary: Vocabulary) -> Constraint:
        answer = None if self.answer is None else resolve("constraint", self.answer).compile(vocabulary)
        return ReasoningConstraint(vocabulary, self, answer)


@dataclass(frozen=True, slots=True)
class _State:
    """Where a text stands.

    Attributes:
        part: "before" it is known whether the text reasons, "reasoning", "answer", or "ended".
        tail: The last bytes, while they may begin a mark.
        spent: Tokens of reasoning.
        first: The state of the answer's constraint before its first token.
        answer: Where the answer stands; None where the text is no beginning of one.
    """

    part: str
    tail: bytes = b""
    spent: int = 0
    first: Any = None
    answer: Any = None


class ReasoningConstraint(Constraint):
    """`Reasoning` for one vocabulary.

    Args:
        vocabulary: The model's.
        spec: The marks and the budget.
        answer: What follows the reasoning part, None where that is free.
    """

    def __init__(self, vocabulary: Vocabulary, spec: Reasoning, answer: Constraint | None) -> None:
        if answer is not None and (answer.bonus is not None or answer.after is not None):
            raise ConstraintError(
                "after a reasoning part only masks are applied: leave out unenforced=check, and policies with a bonus"
            )
        self.vocabulary, self._spec, self._answer = vocabulary, spec, answer
        self.stops = answer is not None and answer.stops
        self._begin, self._end = spec.begin.encode(), spec.end.encode()
        self._ends = end_mask(vocabulary)
        self._all = np.ones(vocabulary.size, dtype=bool)
        # Special tokens are no text, but some models have their marks as such.
        hidden = [id for id in vocabulary.special_ids if vocabulary.pieces[id] not in (self._begin, self._end)]
        self._pieces = [b"" if id in hidden else piece for id, piece in enumerate(vocabulary.pieces)]
        pieces = enumerate(self._pieces)
        parts = {piece: id for id, piece in pieces if piece and (piece in self._begin or piece in self._end)}
        self._parts = sorted(parts.items(), key=lambda part: -len(part[0]))
        last = self._end[-1:]
        self._beyond = [id for id, piece in enumerate(self._pieces) if -1 < piece.find(last) < len(piece) - 1]
        self._masks = cache(self._reasons)
        for mark in (self._begin, self._end):
            # What follows a token is a rest of the mark as well.
            if not all(self._next(mark[n:]) for n in range(len(mark))):
                raise ConstraintError(
                    f"this model has no tokens for each beginning of {mark.decode()!r}: give other marks"
                )

    @property
    def requirements(self) -> Requirements:
        # Free text after the reasoning part may end anywhere.
        ends = self._answer is not None and self._answer.requirements.ends
        return replace(super().requirements, ends=ends)

    def init(self, prompt: Sequence[int]) -> _State:
        said = b"".join(self._pieces[token] for token in prompt[-_PROMPT:] if token >= 0)
        first = None if self._answer is None else self._answer.init(prompt)
        part = "reasoning" if said.rstrip().endswith(self._begin) else "before"
        return _State(part, first=first, answer=first)

    @property
    def asks(self) -> bool:
        return self._answer is not None and self._answer.asks

    def question(self, state: _State) -> Callable[[], object] | None:
        bound = self._answer is not None and state.part in ("before", "answer") and state.answer is not None
        return self._answer.question(state.answer) if bound and self._answer is not None else None

    def idle(self, state: _State) -> bool:
        if state.part == "reasoning":
            return self._answer is None and not self._due(state)
        if state.part == "answer" and self._answer is not None:
            return self._answer.idle(state.answer)
        return self._answer is None and state.part != "ended"

    def allowed(self, state: _State) -> np.ndarray:
        if self.idle(state):
            return self._all
        if state.part == "ended":
            return self._ends
        if state.part == "reasoning":
            return self._only(self._next(self._end[len(state.tail) :])) if self._due(state) else self._masks(state.tail)
        assert self._answer is not None
        if state.part == "answer":
            return self._answer.allowed(state.answer)
        begun = self._only(id for piece, id in self._parts if self._begin.startswith(state.tail + piece))
        return begun if state.answer is None else begun | self._answer.allowed(state.answer)

    def advance(self, state: _State, token: int) -> _State:
        if state.part == "reasoning":
            return self._reasoned(state, token)
        if state.part == "answer" and self._answer is not None:
            return replace(state, answer=self._answer.advance(state.answer, token))
        if state.part == "before":
            return self._begun(state, token)
        return replace(state, part="ended") if self._ends[token] else state

    def is_complete(self, state: _State) -> bool:
        if self._answer is None:
            return True
        return (
            state.part in ("before", "answer") and state.answer is not None and self._answer.is_complete(state.answer)
        )

    def completion(self, state: _State, *, thorough: bool = False) -> list[int] | None:
        if self._answer is None:
            return []
        if state.part in ("before", "answer"):
            return None if state.answer is None else self._answer.completion(state.answer, thorough=thorough)
        after = self._answer.completion(state.first, thorough=thorough)
        return None if after is None else [*self._spelled(self._end[len(state.tail) :]), *after]

    def takes(self, state: _State, tokens: Sequence[int]) -> bool:
        bound = self._answer is not None and state.part == "answer"
        return self._answer.takes(state.answer, tokens) if bound and self._answer is not None else True

    def accepts(self, state: _State, token: int) -> bool:
        if state.part == "answer" and self._answer is not None:
            return self._answer.accepts(state.answer, token)
        return bool(self.allowed(state)[token])

    def _due(self, state: _State) -> bool:
        """Whether the reasoning part has to end."""
        return self._spec.budget is not None and state.spent >= self._spec.budget

    def _begun(self, state: _State, token: int) -> _State:
        """One token on, where it is not known whether the text reasons."""
        text = state.tail + self._pieces[token]
        # What must follow a constraint begins with the mark itself, other texts may have space before it.
        said = text if self._answer is not None else text.lstrip()
        answer = state.answer
        if self._answer is not None and answer is not None:
            answer = self._answer.advance(answer, token) if self._answer.accepts(answer, token) else None
        if self._ends[token]:
            return replace(state, part="ended" if answer is None else "answer", answer=answer)
        if said.startswith(self._begin):
            return self._reasoned(_State("reasoning", said[len(self._begin) :], -1, state.first), None)
        if self._begin.startswith(said):
            return replace(state, tail=said, answer=answer)
        return replace(state, part="answer", tail=b"", answer=answer)

    def _reasoned(self, state: _State, token: int | None) -> _State:
        """One token of reasoning on; None is what stands in the tail already."""
        if token is not None and self._ends[token]:
            return replace(state, part="ended")
        text = state.tail if token is None else state.tail + self._pieces[token]
        if self._end in text:
            return _State("answer", first=state.first, answer=state.first)
        most = min(len(self._end) - 1, len(text))
        tail = next((text[-n:] for n in range(most, 0, -1) if self._end.startswith(text[-n:])), b"")
        return replace(state, tail=tail, spent=state.spent + 1)

    def _reasons(self, tail: bytes) -> np.ndarray:
        """[vocab] bool: tokens of reasoning before a bound answer: no end, and nothing that goes on after the mark."""
        mask = ~self._ends
        texts = ((id, tail + self._pieces[id]) for id in self._beyond)
        mask[[id for id, text in texts if self._end in text and not text.endswith(self._end)]] = False
        return mask

    def _next(self, rest: bytes) -> list[int]:
        """The longest token with which the rest of a mark begins."""
        return [id for piece, id in self._parts if rest.startswith(piece)][:1]

    def _spelled(self, rest: bytes) -> list[int]:
        found: list[int] = []
        while rest and (ids := self._next(rest)):
            found += ids
            rest = rest[len(self._pieces[ids[0]]) :]
        return found

    def _only(self, ids: Any) -> np.ndarray:
        mask = np.zeros(self.vocabulary.size, dtype=bool)
        mask[list(ids)] = True
        return mask
