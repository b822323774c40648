"""SmartSpec: as many drafted tokens as make most text per second, given the batch, the machine and the acceptance."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy
from decodery.step.drafter import VerificationFeedback
from decodery.step.sequence import Sequence

_SHRINK = 2.0
"""How many tests of its own outweigh, for a request, what all requests have seen."""
_FIRST = 0.7
"""The acceptance assumed before anything was tested, as if by one test."""


def best_lengths(
    acceptance: np.ndarray,
    budget: Budget,
    *,
    longest: int,
    draft_seconds: float = 0.0,
    contexts: Ordered[int] | None = None,
    others: Ordered[tuple[int, int]] = (),
    uniform: bool,
) -> np.ndarray:
    """Drafted tokens [n] int of n requests that make most tokens per second.

    The fewer the better among equals.

    Args:
        acceptance: [n] float64 chances that a drafted token is accepted. A chain of k tokens adds 1 + a + ... + a^k
            tokens to the text. A pass has one row for each request and for each drafted token; every drafted token
            costs `draft_seconds`.
        contexts: Tokens in the requests' caches, none by default.
        others: Rows and context of each other text in the pass.
        uniform: The same number for all; otherwise tokens go to the requests where they add most.
    """
    n = len(acceptance)
    gains = acceptance[:, None] ** np.arange(1, longest + 1)
    if uniform:
        lengths = np.tile(np.arange(longest + 1), (n, 1))
        gained = np.concatenate(([0.0], gains.sum(axis=0).cumsum()))
    else:
        # A chain's tokens add less and less, so the best tokens of all requests together are beginnings of chains.
        order = np.argsort(-gains, axis=None, kind="stable")
        taken = np.zeros((n, n * longest + 1), dtype=np.int64)
        taken[order // longest, 1 + np.arange(n * longest)] = 1
        lengths = taken.cumsum(axis=1)
        gained = np.concatenate(([0.0], gains.ravel()[order].cumsum()))
    drafted = lengths.sum(axis=0)
    fixed = np.array([rows for rows, _ in others], dtype=np.int64)
    rows = np.concatenate((lengths + 1, np.tile(fixed[:, None], len(drafted))))
    behind = [*([0] * n if contexts is None else contexts), *(context for _, context in others)]
    goodput = (n + gained) / (budget.batch_seconds(rows, behind) + draft_seconds * drafted)
    return lengths[:, int(goodput.argmax())]


@dataclass(slots=True)
class Tally:
    """Tests of drafted tokens and how many were passed, old ones counting less and less."""

    passed: float = 0.0
    tests: float = 0.0

    def add(self, passed: int, tests: int, forget: float) -> None:
        self.passed = self.passed * forget + passed
        self.tests = self.tests * forget + tests


@dataclass(slots=True)
class _Shared:
    """What all requests have seen. idle: decisions since one drafted; seconds: what a drafted token takes to draft."""

    record: Tally = field(default_factory=lambda: Tally(_FIRST, 1.0))
    idle: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class _State:
    """What one request has seen, and what it shares with the others.

    begun: whether it has drafted before. planned: its length in the step that is being put together, if computed.
    """

    shared: _Shared
    begun: bool = False
    planned: int | None = None
    record: Tally = field(default_factory=Tally)

    @property
    def acceptance(self) -> float:
        common = self.shared.record
        rate = (common.passed + _FIRST * 0.1) / (common.tests + 0.1)
        return (self.record.passed + _SHRINK * rate) / (self.record.tests + _SHRINK)


@register(
    "goodput",
    paper="Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (2024)",
    lossless=True,
)
@dataclass(frozen=True)
class Goodput(DraftLengthPolicy):
    """Drafts as many tokens per request as give most tokens per second, down to none, step by step.

    Weighs the chance of acceptance, from the tests of the last steps, against the measured time of a pass by its number
    of rows and the measured time of drafting. Made for chains. Scope: rates of acceptance last as long as the loaded
    model, by drafter; memory: a few numbers.

    Attributes:
        each: "request" gives every request of a batch a length of its own, "batch" all the same one.
        longest: Drafted tokens per request at most.
        forget: What one step leaves of the weight of earlier tests.
        probe: After so many steps without drafts, one token is, to see whether that is still right.
    """

    each: Literal["request", "batch"] = "request"
    longest: int = 8
    forget: float = 0.95
    probe: int = 50

    requirements = Requirements(costs=True)

    def __post_init__(self) -> None:
        if self.longest < 1 or self.probe < 1 or not 0 < self.forget < 1:
            raise SettingsError("goodput needs longest >= 1, probe >= 1 and forget between 0 and 1")

    def largest(self) -> int:
        return self.longest

    def start(self, seq: Sequence) -> _State:
        key = ("goodput", type(seq.request.drafter).__qualname__)
        return _State(seq.request.memory.recall("process", seq, key, _Shared))

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        state: _State = seq.states[self]
        if state.planned is None:
            self._plan(state.shared.seconds or 0.0, limit, batch)
        length, state.planned = state.planned or 0, None
        state.shared.idle = 0 if length else state.shared.idle + 1
        if state.shared.idle >= self.probe * len(batch):
            length, state.shared.idle = 1, 0
        return replace(limit, nodes=min(length, limit.nodes), depth=min(max(length, 1), limit.depth))

    def _plan(self, draft_seconds: float, limit: Budget, batch: Ordered[Sequence]) -> None:
        """Work out the lengths of all requests that this policy decides for; the rest add the rows they have."""
        ours = [other.request.draft_length == self and other.position > 0 for other in batch]
        planned = [other for other, own in zip(batch, ours, strict=True) if own]
        rest = [other for other, own in zip(batch, ours, strict=True) if not own]
        states: list[_State] = [other.states[other.request.draft_length] for other in planned]
        lengths = best_lengths(
            np.array([each.acceptance for each in states]),
            limit,
            longest=self.longest,
            draft_seconds=draft_seconds,
            contexts=[len(other.tokens) for other in planned],
            others=[(len(other.tokens) - other.cache.next_position, len(other.tokens)) for other in rest],
            uniform=self.each == "batch",
        )
        for each, length in zip(states, lengths.tolist(), strict=True):
            each.planned = length

    def observe(self, seq: Sequence, seen: VerificationFeedback, seconds: float) -> None:
        state: _State = seq.states[self]
        drafted = len(seen.tree) - 1
        passed = len(seen.path)
        last = seen.path[-1] if passed else 0
        tests = passed + (len(seen.tree.children(last)) > 0)
        # A step without a test forgets too, so that what was true long ago does not forbid drafting for ever.
        state.record.add(passed, tests, self.forget)
        state.shared.record.add(passed, tests, self.forget)
        # A request's first draft reads its prompt, which is not what drafting takes from then on.
        if drafted and state.begun:
            each, known = seconds / drafted, state.shared.seconds
            state.shared.seconds = each if known is None else 0.9 * known + 0.1 * min(each, 4 * known)
        state.begun |= drafted > 0
