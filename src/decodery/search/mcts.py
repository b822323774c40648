"""Monte-Carlo tree search over steps: where to go on is decided by what was found after each step so far."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.sampling.logits_processor import require_number
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pool import require_count
from .step_nodes import Node, distinct, require_widening, widens
from .steps import Growth, StepSearch


@register(
    "mcts",
    paper="Bag of Tricks for Inference-time Computation of LLM Reasoning (2025)",
    guarantee="n=1 is plain decoding; none on quality",
    requirements=("a scorer of beginnings and answers, about 0 to 1",),
    texts=("delimiter", "pattern"),
)
@dataclass(frozen=True)
class MCTS(StepSearch):
    """Selects a leaf of the tree of steps, draws n steps after it, and backs its value up.

    Returned are all texts that ended anywhere in the tree, by worth, so that walks that came to a better end than the
    moves count. The other settings are those of all searches over steps, see step-beam. The trace's `visits` tell where
    each walk came to: with the tree's scores it gives every count and every mean again. Cost: n steps a walk; memory:
    the tree's texts.

    Attributes:
        rounds: The depth of the tree, whose last step goes on to the text's end.
        n: Continuations of a text.
        simulations: Walks before the text moves on by the step that was visited most (the better one among equals),
            which keeps all that was found after it. A walk goes down where Q + U is largest, Q the mean of the values
            backed up through a step, or its own where there is none yet, and U = (c + ln((N + base + 1) / base))
            sqrt(N) / (1 + n) with N and n the visits of parent and child; bound "uct" has U = c sqrt(ln(N + 1) / (1 +
            n)). The prior is even, so no draw is favoured. What a walk backs up is the value of the leaf it came to, by
            the scorer: there are no rollouts. Values of one step should lie about 1 apart at most, as U is measured by
            that.
        c: Weight of exploration.
        base: How slowly exploration grows with visits under "puct".
        bound: The bound by which walks choose steps, see `simulations`.
        moves: "visited" is that; "never" makes all walks from the prompt, after which the best values are followed to
            an end.
        widening: n further continuations are drawn after a text as soon as it was visited often enough for visits **
            widening to be as large as the number of such draws (published is None, one draw; 0.5 is usual), so that
            what the first ones miss can still be found.
    """

    rounds: int = 8
    n: int = 4
    simulations: int = 5
    c: float = 1.25
    base: float = 19652.0
    bound: Literal["puct", "uct"] = "puct"
    moves: Literal["visited", "never"] = "visited"
    widening: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("mcts", "n", self.n)
        require_count("mcts", "simulations", self.simulations)
        require_number("the c of mcts", self.c, least=0)
        require_number("the base of mcts", self.base, above=0)
        if self.bound not in ("puct", "uct") or self.moves not in ("visited", "never"):
            raise SettingsError("mcts has the bound puct or uct, and moves visited or never")
        require_widening("mcts", self.widening)

    def follow(self, growth: Growth) -> ForwardCoroutine[list[Sequence]]:
        path = [Visited(growth.root)]
        yield from self._expand(growth, path[0])
        while not path[-1].node.finished:
            for _ in range(self.simulations):
                yield from self._simulate(growth, list(path))
            if self.moves == "never" or not path[-1].children:
                break
            path.append(max(path[-1].children, key=lambda child: (child.visits, child.mean)))
        if not (found := list(path[0].ended())):
            yield from self._to_an_end(growth, path[0])
            found = list(path[0].ended())
        return (yield from growth.finish(found))

    def _simulate(self, growth: Growth, path: list[Visited]) -> ForwardCoroutine[None]:
        """A walk from the end of this path, which begins at the prompt, to a leaf that it leaves with children."""
        while path[-1].children:
            if widens(self.widening, path[-1].visits, path[-1].draws):
                yield from self._expand(growth, path[-1])
            path.append(self.picked(path[-1]))
        leaf = path[-1]
        if not leaf.node.finished:
            yield from self._expand(growth, leaf)
        back_up(path, leaf.value)
        growth.trace.visits.append(leaf.node.number)

    def picked(self, parent: Visited) -> Visited:
        """The child that a walk goes on to: that of the largest bound, the first among equals."""
        return max(parent.children, key=lambda child: child.mean + self._bonus(parent.visits, child.visits))

    def _bonus(self, parent: int, child: int) -> float:
        if self.bound == "uct":
            return self.c * math.sqrt(math.log(parent + 1) / (1 + child))
        rate = self.c + math.log((parent + self.base + 1) / self.base)
        return rate * math.sqrt(parent) / (1 + child)

    def _expand(self, growth: Growth, leaf: Visited) -> ForwardCoroutine[None]:
        leaf.draws += 1
        drawn = yield from growth.extend([leaf.node] * self.n)
        known = [child.node for child in leaf.children]
        judged = yield from growth.judge(distinct([*known, *drawn])[len(known) :])
        leaf.children += [Visited(node, self.worth(node)) for node in judged]

    def _to_an_end(self, growth: Growth, at: Visited) -> ForwardCoroutine[None]:
        """Follow the best means down, and on below the tree, until a text ends."""
        while not at.node.finished:
            if not at.children:
                yield from self._expand(growth, at)
            if not at.children:
                return
            at = max(at.children, key=lambda child: child.mean)


@dataclass(eq=False, slots=True)
class Visited:
    """A text in the tree.

    Attributes:
        value: What the scorer makes it worth.
        visits, total: Walks through it, and the sum of what they found.
        draws: How often continuations of it were drawn.
    """

    node: Node
    value: float = 0.0
    visits: int = 0
    total: float = 0.0
    draws: int = 0
    children: list[Visited] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return self.total / self.visits if self.visits else self.value

    def ended(self) -> Iterator[Node]:
        """The texts at and below it that have ended."""
        if self.node.finished:
            yield self.node
        for child in self.children:
            yield from child.ended()


def back_up(path: Ordered[Visited], value: float) -> None:
    """Enter in all of a walk what its leaf was worth."""
    for each in path:
        each.visits += 1
        each.total += value
