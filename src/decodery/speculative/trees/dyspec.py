"""DySpec: spend the nodes where the drafter itself expects them to be accepted."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing


@register(
    "dyspec",
    paper="DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure (2024)",
    guarantee="the output distribution is unchanged; siblings are draws without replacement",
    lossless=True,
)
@dataclass(frozen=True)
class DySpec(TreePolicy):
    """Draws the next token where acceptance is most likely, estimated by draft probabilities.

    Cost: places among which the rest of the nodes must lie are expanded together, so that the tree of the one-by-one
    algorithm takes about one draft pass per level.

    Attributes:
        nodes: How many are drawn. A place below a node is worth the probability of getting there and rejecting all
            earlier siblings; the place worth most is drawn next.
        threshold: In place of that, a level at a time, children are drawn as long as their place is worth more than
            this, about 1 / nodes; once `nodes` are drawn no more are.
        temperature: Of the drafter where the request is greedy; its most likely tokens are then taken in order.
    """

    nodes: int = 64
    threshold: float | None = None
    temperature: float = 0.6

    provides = Provides(drafts=("without-replacement",))

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 < self.temperature < np.inf or (self.threshold is not None and self.threshold <= 0):
            raise SettingsError("dyspec needs nodes >= 1, a finite temperature above 0 and a threshold above 0")

    def largest(self) -> int:
        return self.nodes

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        limits = Budget(min(self.nodes, budget.nodes), budget.depth)
        growing = Growing(expander, seq, limits, self.origin, self.temperature)
        if self.threshold is None:
            yield from _best_first(growing)
        else:
            yield from _by_level(growing, self.threshold)
        return growing.finish()


def _reach(logq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From log-probabilities [m, k] of children in draw order: the probability that each place is tried, and taken.

    A child's residual probability is q over what its earlier siblings left, so that both products are telescopes.
    """
    taken = np.exp(logq)
    left = 1.0 - np.cumsum(taken, axis=1) + taken
    return np.maximum(left, 0.0), taken


def _by_level(growing: Growing, threshold: float) -> ForwardCoroutine[None]:
    frontier, values = np.zeros(1, dtype=np.int64), np.ones(1)
    while growing.room > 0:
        alive = np.isin(frontier, growing.open(frontier)) & (values > threshold)
        frontier, values = frontier[alive], values[alive]
        if not len(frontier):
            return
        ids, logq, _ = yield from growing.children(frontier, growing.room)
        left, taken = _reach(logq)
        row, column = np.nonzero((values[:, None] * left > threshold) & (ids >= 0))
        row, column = row[: growing.room], column[: growing.room]
        frontier, values = growing.add(frontier[row], ids[row, column]), values[row] * taken[row, column]


def _best_first(growing: Growing) -> ForwardCoroutine[None]:
    # A place: minus its worth, a number that settles ties, the parent, and which of its children comes next.
    heap: list[tuple[float, int, int, int]] = [(-1.0, 0, 0, 0)]
    known: dict[int, tuple[list[int], list[float], list[float]]] = {}
    values, pushed = [1.0], 1
    parents: list[int] = []
    tokens: list[int] = []
    left = growing.room
    while heap and left:
        if heap[0][2] not in known:
            growing.add(np.array(parents, dtype=np.int64), np.array(tokens, dtype=np.int64))
            parents, tokens = [], []
            # Every draw takes the worthiest place and leaves ones worth less: of those known only these can be next.
            wanted = {place[2] for place in nsmallest(left, heap)} - known.keys()
            nodes = np.array(sorted(wanted))
            closed = wanted - set(growing.open(nodes).tolist())
            heap = [place for place in heap if place[2] not in closed]
            heap.sort()
            nodes = growing.open(nodes)
            if len(nodes):
                ids, logq, _ = yield from growing.children(nodes, left)
                reach, taken = _reach(logq)
                rows = zip(ids.tolist(), reach.tolist(), taken.tolist(), strict=True)
                known.update(zip(nodes.tolist(), rows, strict=True))
            continue
        _, _, parent, number = heappop(heap)
        ids_, reach_, taken_ = known[parent]
        if number == len(ids_) or ids_[number] < 0:
            continue
        parents.append(parent)
        tokens.append(ids_[number])
        values.append(values[parent] * taken_[number])
        left -= 1
        for worth, below, following in (
            (values[-1], len(values) - 1, 0),
            (values[parent] * (reach_[number] - taken_[number]), parent, number + 1),
        ):
            if worth > 0.0:
                heappush(heap, (-worth, pushed, below, following))
                pushed += 1
    growing.add(np.array(parents, dtype=np.int64), np.array(tokens, dtype=np.int64))
