"""Trees as large as this machine makes pay, from how often children of each rank and depth were accepted."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.sequence import Sequence

DEPTHS = 16
RANKS = 8
_BELIEF = 4.0
"""How many trials at a depth outweigh what the rank is worth at all depths, and these what it is assumed to be."""
_EVERY = 8
"""Steps after which the best tree is worked out anew."""


class ChildRates:
    """How often the child of each rank, of an accepted node of each depth, was accepted.

    Recent times count more. A rank is a place among siblings in the order they were drawn. A child is put to the test
    where it is there and no sibling before it was accepted. Depths beyond the last share its counts; ranks beyond the
    last are not counted.
    """

    def __init__(self) -> None:
        self._passed = np.zeros((DEPTHS, RANKS))
        self._tests = np.zeros((DEPTHS, RANKS))
        self.steps = 0

    def learn(self, tree: DraftTree, path: Ordered[int], *, full: bool, depth: int, forget: float) -> None:
        """One scored tree and its accepted path.

        Args:
            full: Whether it had all the nodes it was allowed; if not, places below accepted nodes that stayed empty,
                down to `depth`, count as tests that failed, because this drafter does not fill them.
        """
        self.steps += 1
        self._passed *= forget
        self._tests *= forget
        for level, (node, taken) in enumerate(zip([0, *path], [*path, None], strict=True)):
            at, children = min(level, DEPTHS - 1), tree.children(node).tolist()
            if taken is None:
                self._tests[at, : len(children) if full or level >= depth else RANKS] += 1
                continue
            rank = children.index(taken)
            self._tests[at, : rank + 1] += 1
            if rank < RANKS:
                self._passed[at, rank] += 1

    @property
    def rates(self) -> np.ndarray:
        """[DEPTHS, RANKS] float64 chances; falling along the ranks, whose sum is below 1."""
        # Assumed is that rank r is accepted once in (r + 1)(r + 2) times: once in r + 2 of those that get to it.
        assumed = 1.0 / (np.arange(RANKS) + 2.0)
        pooled = (self._passed.sum(axis=0) + _BELIEF * assumed) / (self._tests.sum(axis=0) + _BELIEF)
        chances = (self._passed + _BELIEF * pooled) / (self._tests + _BELIEF)
        left = np.cumprod(1.0 - chances, axis=1)
        chances[:, 1:] *= left[:, :-1]
        return np.minimum.accumulate(chances, axis=1)


def best_tree(rates: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance probabilities [nodes], falling, and depths [nodes] of the `nodes` most likely nodes.

    A place's chance is the product of the rates along its path, so that any first m places make up the best tree of m
    nodes.

    Args:
        rates: [depths, ranks], see `ChildRates.rates`; deeper than its last row, that row holds.
    """
    chances, depths = np.zeros(nodes), np.zeros(nodes, dtype=np.int64)
    heap = [(-float(rates[0, 0]), 1, 0, 1.0)]
    for node in range(nodes):
        negative, depth, rank, above = heappop(heap)
        chances[node], depths[node] = -negative, depth
        if rank + 1 < rates.shape[1]:
            row = min(depth - 1, len(rates) - 1)
            heappush(heap, (-above * float(rates[row, rank + 1]), depth, rank + 1, above))
        heappush(heap, (negative * float(rates[min(depth, len(rates) - 1), 0]), depth + 1, 0, -negative))
    return chances, depths


def best_size(
    chances: np.ndarray, depths: np.ndarray, budget: Budget, contexts: Ordered[int], *, level_seconds: float = 0.0
) -> int:
    """How many nodes of `best_tree` make most tokens per second, the fewest among equals.

    Each has such a tree in it, and every level of each takes `level_seconds` to draft.

    Args:
        contexts: Tokens in the caches of the texts in the pass.
    """
    sizes = np.arange(len(chances) + 1)
    expected = 1.0 + np.concatenate(([0.0], chances.cumsum()))
    deepest = np.concatenate(([0], np.maximum.accumulate(depths)))
    rows = np.tile(sizes + 1, (len(contexts), 1))
    seconds = budget.batch_seconds(rows, contexts) + len(contexts) * deepest * level_seconds
    return int((expected / seconds).argmax())


@dataclass(slots=True)
class _Shared:
    """What all requests have seen, and the tree computed from it last."""

    rates: ChildRates
    seconds: float | None = None
    idle: int = 0
    due: int = 0
    sequences: int = 0
    nodes: int = 0
    depth: int = 0


@dataclass(slots=True)
class _State:
    """granted: this step's bounds. begun: whether the request has drafted before."""

    shared: _Shared
    granted: tuple[int, int] = (0, 0)
    begun: bool = False


@register(
    "hardware",
    paper="Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference (2024)",
    lossless=True,
)
@dataclass(frozen=True)
class Hardware(DraftLengthPolicy):
    """Bounds nodes and depth by the tree that makes most tokens per second on this machine.

    The value of a place is the chance, measured by rank among siblings and by depth, that all children down to it are
    accepted; of the best trees of 0, 1, 2, ... places the one is taken that has most expected tokens for the measured
    time of its pass and of drafting its levels. The published search sizes trees once per machine, for rates measured
    in advance; here rates are counted while decoding. Scope: rates last as long as the loaded model, by drafter;
    memory: 2 kB.

    Attributes:
        most: Nodes at most.
        forget: What one step leaves of the weight of earlier ones.
        probe: Every so many steps twice as many nodes are allowed, to see what they are worth, and again at the next
            step as long as some beyond the usual ones are accepted.
    """

    most: int = 64
    forget: float = 0.95
    probe: int = 16

    requirements = Requirements(costs=True)

    def __post_init__(self) -> None:
        if self.most < 1 or self.probe < 1 or not 0 < self.forget <= 1:
            raise SettingsError("hardware needs most >= 1, probe >= 1 and forget between 0 and 1")

    def largest(self) -> int:
        return self.most

    def start(self, seq: Sequence) -> _State:
        key = ("hardware", type(seq.request.drafter).__qualname__)
        return _State(seq.request.memory.recall("process", seq, key, lambda: _Shared(ChildRates())))

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        state: _State = seq.states[self]
        shared = state.shared
        if shared.rates.steps >= shared.due or shared.sequences != limit.sequences:
            self._size(shared, limit, [len(other.tokens) for other in batch])
        nodes, depth = shared.nodes, shared.depth
        shared.idle += 1
        if shared.idle >= self.probe:
            shared.idle, nodes, depth = 0, 2 * nodes + 2, depth + 2
        state.granted = min(nodes, limit.nodes), min(max(depth, 1), limit.depth)
        return replace(limit, nodes=state.granted[0], depth=state.granted[1])

    def _size(self, shared: _Shared, limit: Budget, contexts: Ordered[int]) -> None:
        chances, depths = best_tree(shared.rates.rates, min(self.most, limit.nodes))
        level = shared.seconds or 0.0
        shared.nodes = best_size(chances, depths, limit, contexts, level_seconds=level)
        shared.depth = int(depths[: shared.nodes].max(initial=0))
        shared.due, shared.sequences = shared.rates.steps + _EVERY, limit.sequences

    def observe(self, seq: Sequence, seen: VerificationFeedback, seconds: float) -> None:
        state: _State = seq.states[self]
        drafted, (nodes, depth) = len(seen.tree) - 1, state.granted
        if not drafted:
            return
        shared = state.shared
        if nodes > shared.nodes and any(node > shared.nodes for node in seen.path):
            # What is worth more than was thought is looked at again at once, or good drafts would wait for probes.
            shared.idle, shared.due = self.probe, 0
        shared.rates.learn(seen.tree, seen.path, full=drafted >= nodes, depth=depth, forget=self.forget)
        # A request's first draft reads its prompt, which is not what drafting takes from then on.
        if state.begun:
            each, known = seconds / int(seen.tree.depths.max()), shared.seconds
            shared.seconds = each if known is None else 0.9 * known + 0.1 * min(each, 4 * known)
        state.begun = True
