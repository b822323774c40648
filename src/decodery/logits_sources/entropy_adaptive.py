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
    guarantee="every token is drawn from the distribution of one of the two models",
    requirements=("a second model with the same vocabulary",),
)
@dataclass(frozen=True)
class EntropyAdaptive(LogitsSource):
    """Switches between a small model and the loaded one by the mean entropy of the last few tokens.

    Entropies are measured on the logits before any processor. The small model begins. A model runs only while it is
    active; when it becomes active, it reads all missed tokens in one pass. Every node of a draft tree has its own
    state, so a pass runs both models only if a path contains a switch.

    Attributes:
        small: A `LanguageModel`, or a name for `decodery.load`.
        threshold: Entropy in bits; above it the loaded model writes from the next token on, else the small one.
            Infinity always uses the small model.
        window: Number of tokens over which the entropy is averaged, whichever model wrote them.
        stay: Minimum number of tokens after a switch, and at the beginning, before the next switch. The paper does not
            give its value.
        dtype: Data type of a model that is loaded by name, such as "int4".
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
    """State after a token: the active model, the number of tokens since the switch, the last entropies in bits."""

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
        # The model that is active at the root reads all rows; after a switch, the other one reads the remaining rows.
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
    """The rows of one segment from the root down: the model that scores each, and the resulting states."""

    def __init__(self, model: _Switching, part: Part) -> None:
        self.model, self.part = model, part
        segment, contexts = part.segment, part.contexts
        self.parents = np.arange(-1, len(segment) - 1) if segment.mask is None else _parents(segment.mask)
        self.end_of_prompt = contexts.prompt_length - 1
        # Every output row is scored, even if its logits are not requested, because later states depend on it.
        self.scored = np.flatnonzero(segment.positions >= self.end_of_prompt)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.bits: dict[tuple[int, int], float] = {}
        self.who = [_SMALL] * len(segment)
        self.states: list[_State | None] = [None] * len(segment)

    def first(self) -> tuple[int, Rows | None]:
        """The member that is active at the root, and all rows."""
        state = self._before(int(self.scored[0])) if len(self.scored) else None
        everything = self.part.everything()
        return _SMALL if state is None else state.active, Rows(
            everything.fed, np.union1d(self.scored, self.part.wanted)
        )

    def rest(self) -> tuple[int, Rows | None]:
        """The other member, and the rows that it must score."""
        left = np.array([row for row in self.scored if self.states[row] is None], dtype=np.int64)
        if not len(left):
            return _SMALL, None
        other = 1 - self.first()[0]
        return other, self.part.only(other, left)

    def learn(self, number: int, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Store the logits [len(rows), vocab] of member `number` for `rows`, and compute the states after them."""
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
        """The logits [wanted, vocab], each row's from the member that is active there."""
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
        """The state in which a row is scored; None where an ancestor has not been scored."""
        parent = int(self.parents[row])
        if self.part.segment.positions[row] == self.end_of_prompt:
            return _State()
        before: _State | None = self.part.contexts.states[-1] if parent < 0 else self.states[parent]
        return before


def _parents(mask: np.ndarray) -> np.ndarray:
    """The parent of each row of the tree mask `mask` [n, n]: the last other row that it attends to, -1 for none."""
    above = mask & ~np.eye(len(mask), dtype=bool)
    return np.where(above.any(axis=1), len(mask) - 1 - above[:, ::-1].argmax(axis=1), -1)
