"""A*-decoding: the text that promises most is continued next, however far it has come."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count as numbers_from
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.ledger import count
from decodery.core.registry import register
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pool import require_count
from .step_nodes import Node, distinct, require_widening, widens
from .steps import Growth, StepSearch

Cost = Literal["drop", "consistent"]


@register(
    "a-star",
    paper="A*-Decoding: Token-Efficient Inference Scaling (2025)",
    guarantee="with cost=consistent, one goal, and a budget that lasts, no other text it has written to its end has a "
    "smaller f; k=1 is plain decoding; none on quality",
    requirements=("a scorer of beginnings and answers, between 0 and 1",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class AStar(StepSearch):
    """Expands the text with the least f = g + h by k steps, until the best text has ended.

    h is 1 - the reward; g adds up along a text what its steps cost: with cost "drop" what each lost of the reward, with
    "consistent" what it gained, so that f never falls along a text. Of equal f the longer text goes first, then the one
    begun first; of equal continuations one is kept. The paper's code is not public: the costs are two readings of it, k
    and expansions no published numbers. The other settings are those of all searches over steps, see step-beam. Cost: k
    steps and scores an expansion, one expansion after the other.

    Attributes:
        k: Continuations per expansion.
        cost: What a step adds to g: "drop", what it lost of the reward, or "consistent", what it gained.
        expansions, tokens: How many texts may be continued, and be written before the last of them (None: any number);
            after that the ended text of least f is returned, or else the longest one is written to its end, which the
            ledger counts as `completed`.
        frontier: How many texts wait at most, the worst being left (None: all).
        batch: How many are continued at a time; more of them share passes, and stray from the order.
        goals: How many ended texts are looked for, the best of them, or the answer of most votes, being chosen by
            `choose`.
        widening: A text is drawn from again as soon as visits ** widening, of the expansions at and after it, is as
            large as the number of its draws (None: once; 0.5 is usual), so that what k draws missed can still be found;
            where no text waits any more that of least f is.
    """

    k: int = 4
    cost: Cost = "drop"
    expansions: int = 64
    tokens: int | None = None
    frontier: int | None = None
    batch: int = 1
    goals: int = 1
    widening: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k", "expansions", "tokens", "frontier", "batch", "goals"):
            if getattr(self, name) is not None or name not in ("tokens", "frontier"):
                require_count("a-star", name, getattr(self, name))
        if self.cost not in ("drop", "consistent"):
            raise SettingsError(f"the cost of a-star is drop or consistent, not {self.cost!r}")
        require_widening("a-star", self.widening)

    @property
    def texts_at_once(self) -> int:
        """See `Search.texts_at_once`."""
        return self.k * self.batch

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        frontier = Frontier(self.frontier)
        frontier.push([Waiting(growth.root, 0.0, 1.0)])
        goals: list[Node] = []
        opened: list[Waiting] = []
        expanded = 0
        while len(goals) < self.goals:
            enough = self.tokens is not None and growth.trace.ledger.tokens >= self.tokens
            most = 0 if enough else min(self.batch, self.expansions - expanded)
            taken = frontier.take(most)
            if not taken and most and opened and self.widening is not None:
                taken = [min(opened, key=lambda each: each.f)]
            if not taken:
                break
            if taken[0].node.finished:
                goals.append(taken[0].node)
                continue
            expanded += len(taken)
            opened += [each for each in taken if not each.draws]
            yield from self._expand(growth, frontier, taken)
            frontier.push([each for each in opened if self._again(each, frontier)])
        count("expansions", expanded)
        count("dropped", frontier.dropped)
        return (yield from growth.finish(goals or (yield from self._instead(growth, frontier))))

    def _expand(self, growth: Growth, frontier: Frontier, taken: list[Waiting]) -> ForwardCoroutine[None]:
        """Write the next steps of these texts, and let them wait."""
        drawn = yield from growth.extend([each.node for each in taken for _ in range(self.k)])
        parents = {id(child): taken[number // self.k] for number, child in enumerate(drawn)}
        known = [child for each in taken for child in each.children]
        children = yield from growth.judge(distinct([*known, *drawn])[len(known) :])
        found = []
        for child in children:
            parent, h = parents[id(child)], 1 - self.reward(child)
            parent.children.append(child)
            found.append(Waiting(child, parent.g + edge_cost(parent.h, h, self.cost), h, parent))
        for each in taken:
            each.drawn()
        frontier.push(found)

    def _again(self, each: Waiting, frontier: Frontier) -> bool:
        """Whether a text that was drawn from is to wait once more."""
        return widens(self.widening, each.visits, each.draws) and each not in frontier

    def _instead(self, growth: Growth, frontier: Frontier) -> ForwardCoroutine[list[Node]]:
        """What is returned where the budget is spent: a text that has ended, or one that is written to its end."""
        waiting = frontier.waiting
        if ended := [each for each in waiting if each.node.finished]:
            return [ended[0].node]
        if not waiting:
            return []
        count("completed")
        deepest = max(waiting, key=lambda each: each.node.depth)
        whole = yield from growth.extend([deepest.node], whole=True)
        return (yield from growth.judge(whole))


def edge_cost(before: float, after: float, kind: Cost) -> float:
    """What a step costs that leads from one h to another."""
    return max(0.0, after - before if kind == "drop" else before - after)


@dataclass(eq=False, slots=True)
class Waiting:
    """A text that may be continued, or has ended.

    Attributes:
        g: What its steps have cost.
        h: What is left at best.
        draws: How often continuations of it were drawn.
        visits: Draws from it and from all after it.
        children: Those that are known.
    """

    node: Node
    g: float
    h: float
    parent: Waiting | None = None
    draws: int = 0
    visits: int = 0
    children: list[Node] = field(default_factory=list)

    def drawn(self) -> None:
        """Enter that continuations of it were drawn."""
        self.draws += 1
        at: Waiting | None = self
        while at is not None:
            at.visits += 1
            at = at.parent

    @property
    def f(self) -> float:
        return self.g + self.h


class Frontier:
    """Texts that wait to be continued.

    Args:
        most: Of them at a time.
        dropped: How many were left for that.
    """

    def __init__(self, most: int | None = None) -> None:
        self.dropped = 0
        self._most = most
        self._heap: list[tuple[float, int, int, Waiting]] = []
        self._numbers = numbers_from()

    @property
    def waiting(self) -> list[Waiting]:
        """All of them, the first to be taken first."""
        return [entry[-1] for entry in sorted(self._heap)]

    def __contains__(self, each: Waiting) -> bool:
        return any(entry[-1] is each for entry in self._heap)

    def push(self, found: list[Waiting]) -> None:
        for each in found:
            heapq.heappush(self._heap, (each.f, -each.node.depth, next(self._numbers), each))
        if self._most is not None and len(self._heap) > self._most:
            self.dropped += len(self._heap) - self._most
            # A sorted list is a heap.
            self._heap = heapq.nsmallest(self._most, self._heap)

    def take(self, most: int) -> list[Waiting]:
        """The first alone if it has ended; else the first so many that come before any that has."""
        if self._heap and self._heap[0][-1].node.finished:
            return [heapq.heappop(self._heap)[-1]]
        taken: list[Waiting] = []
        while self._heap and len(taken) < most and not self._heap[0][-1].node.finished:
            taken.append(heapq.heappop(self._heap)[-1])
        return taken
