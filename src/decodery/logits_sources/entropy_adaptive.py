"""Entropy adaptive decoding: a small model writes the easy tokens, the large one the hard ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.hooks import Tap
from decodery.models.loaders.named import Precision, named
from decodery.models.protocol import LanguageModel, Reader
from decodery.sampling.entropy import entropy
from decodery.sampling.logits_processor import require_count
from decodery.step.forward_request import ForwardCoroutine, ForwardResult
from decodery.step.logits_source import LogitsSource

from .contexts import Blend, Member, Part, Rows

_SMALL, _LARGE = 0, 1


@register(
    "entropy-adaptive",
    paper="Entropy Adaptive Decoding: Dynamic Model Switching for Efficient Inference (2025)",
    guarantee="every token is one model's or the other's",
    requirements=("a second model with the same vocabulary",),
)
@dataclass(frozen=True)
class EntropyAdaptive(LogitsSource):
    """Switches between a small model and the loaded one by the mean entropy of the last few tokens.

    Entropies are those of the logits before any processor. Each model reads only when it is its turn, and then all it
    missed in one chunk; the small one begins. In a drafted tree every node has a state of its own, so a pass runs both
    models only where a path crosses a switch.

    Attributes:
        small: A `LanguageModel`, or a name `decodery.load` knows.
        threshold: Bits; above it the loaded model takes over from the next token on, else the small one; infinity is
            the small model alone.
        window: Tokens averaged over, whichever model wrote them.
        stay: Tokens after a switch, and at the beginning, before the next one (the paper's value is not known).
        dtype: What a named one is loaded in, such as "int4".
    """

    small: LanguageModel | str
    threshold: float = 1.0
    window: int = 5
    stay: int = 10
    dtype: Precision = "auto"

    provides = Provides()

    def __post_init__(self) -> None:
        require_count("stay", self.stay)
        if self.window < 1 or math.isnan(self.threshold):
            raise SettingsError("entropy-adaptive needs window >= 1 and a threshold in bits")

    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        members = (Member("small", named(self.small, self.dtype)), Member("large", model))
        return _Switching(members, len(prompt), threshold=self.threshold, window=self.window, stay=self.stay)


class _State(NamedTuple):
    """Where a text stands after a token: who scores the next row, since how many tokens, the last entropies in bits."""

    active: int = _SMALL
    since: int = 0
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Switching(Blend):
    threshold: float = field(kw_only=True)
    window: int = field(kw_only=True)
    stay: int = field(kw_only=True)

    def composed(self, part: Part, taps: Sequence[Tap]) -> ForwardCoroutine[ForwardResult]:
        walk = _Walk(self, part)
        # Whose turn it is at the root reads all rows; whoever takes over below it, what is then left.
        for ask in (walk.first, walk.rest):
            number, rows = ask()
            if rows is not None:
                scored = yield from part.read(number, rows)
                walk.learn(number, rows.wanted, scored.logits)
        return ForwardResult(walk.finish())

    def after(self, state: _State, bits: float) -> _State:
        """The state after a token whose distribution had this entropy."""
        entropies = (*state.entropies, bits)[-self.window :]
        since = state.since + 1
        if since >= self.stay:
            active = _LARGE if math.fsum(entropies) / len(entropies) > self.threshold else _SMALL
            if active != state.active:
                return _State(active, 0, entropies)
        return _State(state.active, since, entropies)


class _Walk:
    """One segment's rows from the root down: who scores each, and what follows from that for those below it."""

    def __init__(self, model: _Switching, part: Part) -> None:
        self.model, self.part = model, part
        segment, contexts = part.segment, part.contexts
        self.parents = np.arange(-1, len(segment) - 1) if segment.mask is None else _parents(segment.mask)
        self.end_of_prompt = contexts.prompt_length - 1
        # Every output row is scored, wanted or not, because what comes after depends on it.
        self.scored = np.flatnonzero(segment.positions >= self.end_of_prompt)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.bits: dict[tuple[int, int], float] = {}
        self.who = [_SMALL] * len(segment)
        self.states: list[_State | None] = [None] * len(segment)

    def first(self) -> tuple[int, Rows | None]:
        """The member whose turn it is at the root, and all rows."""
        state = self._before(int(self.scored[0])) if len(self.scored) else None
        everything = self.part.everything()
        return _SMALL if state is None else state.active, Rows(
            everything.fed, np.union1d(self.scored, self.part.wanted)
        )

    def rest(self) -> tuple[int, Rows | None]:
        """The other member, and the rows that could not be computed without it."""
        left = np.array([row for row in self.scored if self.states[row] is None], dtype=np.int64)
        if not len(left):
            return _SMALL, None
        other = 1 - self.first()[0]
        return other, self.part.only(other, left)

    def learn(self, number: int, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Take in what member `number` says of `rows`, [len(rows), vocab], and work out the states that follow."""
        nats = entropy(logits.log_softmax(dim=-1)).flatten().tolist()
        for row, scored, value in zip(rows.tolist(), logits, nats, strict=True):
            self.logits[number, row] = scored
            self.bits[number, row] = value / math.log(2)
        for row in self.scored.tolist():
            state = self._before(row)
            if state is not None and (state.active, row) in self.bits:
                self.who[row] = state.active
                self.states[row] = self.model.after(state, self.bits[state.active, row])

    def finish(self) -> torch.Tensor:
        """The logits [wanted, vocab], each row's from the member whose turn it is there."""
        events = {}
        for row in self.scored.tolist():
            state = self.states[row]
            assert state is not None
            tokens = "large tokens" if self.who[row] == _LARGE else "small tokens"
            events[row] = (tokens, "switches") if state.since == 0 else (tokens,)
        self.part.contexts.note(events, self.states)
        rows = [self.logits[self.who[row], row] for row in self.part.wanted.tolist()]
        return (
            torch.stack(rows)
            if rows
            else torch.empty(0, self.model.vocab_size, device=self.model.device, dtype=torch.float32)
        )

    def _before(self, row: int) -> _State | None:
        """The state in which a row is scored; None where a row above it has not been scored."""
        parent = int(self.parents[row])
        if self.part.segment.positions[row] == self.end_of_prompt:
            return _State()
        before: _State | None = self.part.contexts.states[-1] if parent < 0 else self.states[parent]
        return before


def _parents(mask: np.ndarray) -> np.ndarray:
    """The last row that each row of `mask` [n, n] sees beside itself, -1 for none: the row above it in the tree."""
    above = mask & ~np.eye(len(mask), dtype=bool)
    return np.where(above.any(axis=1), len(mask) - 1 - above[:, ::-1].argmax(axis=1), -1)
