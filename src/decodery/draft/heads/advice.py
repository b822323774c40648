"""A head that is asked only where what it says is worth the time it takes to say it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from time import perf_counter

from ...core.sequence import Sequence
from ...core.tree import TokenTree
from ..base import Observation
from ..stores.blending import Blending, Offer, Told
from ..stores.expectations import Expectations
from .reading import HeadReading

_WIDTH = 8
"""Likeliest tokens of a head that are weighed."""
_SHARE, _TRIED = 0.08, 5
"""What a question is believed to take, in units of a pass, until so many have been asked."""
_FALLS, _RISES = 0.3, 0.03
_USUAL = 8
"""Tokens that are read for a question at most, for its time to tell of others: a prompt is read once."""
_READ = 0.002
"""What every token adds that has to be read first, in units of a pass, over the questions that have the use of it."""
_WAITING = 128
"""Tokens that wait to be read at most. A head that is asked for the first time reads the end of a long prompt alone."""
_PATIENCE = 32
"""Steps without a question after which one is asked whatever it seems worth: texts change. Twice as many each time."""


@dataclass(slots=True)
class AskCosts:
    """Seconds of a question about the end of the text, behind new text, and of one about nodes below it; 0: unknown.

    asked: how many there were of both. idle: steps since the last one, in any text; patience: at most.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    asked: list[int] = field(default_factory=lambda: [0, 0])
    idle: int = 0
    patience: int = _PATIENCE

    def known(self, below: bool) -> float:
        """What is known of such a question's time, 0 before enough were asked."""
        return self.seconds[below] if self.asked[below] >= _TRIED else 0.0

    def learn(self, below: bool, took: float) -> None:
        self.asked[below] += 1
        known = self.seconds[below] or took
        # Disturbances only ever make a question longer, and the first ones lay out weights.
        self.seconds[below] = known + (_FALLS if took < known else _RISES) * (min(took, 2 * known) - known)


@dataclass(slots=True)
class HeadAdvice:
    """One text's head. told: by node, what was said in this step; spent: seconds it took.

    blending, costs: common to all texts. passes: seconds of a pass of this step without drafts; timed: whether times
    are measured, and not given.
    """

    reading: HeadReading
    blending: Blending
    costs: AskCosts
    told: dict[int, Told] = field(default_factory=dict)
    spent: float = 0.0
    passes: float = 0.0
    timed: bool = False

    def begin(self, passes: float, timed: bool) -> None:
        """A step begins."""
        self.passes, self.timed = passes, timed
        self.told, self.spent = {}, 0.0
        self.costs.idle += 1

    def see(self, seq: Sequence, seen: Observation) -> None:
        """Take the states of what became text, to be read when somebody asks."""
        self.reading.see(seq, seen)
        # Now and then, since what is left has to be copied.
        if self.reading.unread > 2 * _WAITING:
            self.reading.skip(_WAITING)

    def reaches(self, depth: int) -> bool:
        """Whether it can say what follows a node this deep."""
        return not self.reading.empty and depth < self.reading.head.reach

    def pays(self, node: int, saved: float) -> bool:
        """Whether to ask about a node and others, where what it says saves so many seconds on average."""
        costs = self.costs
        takes = (costs.known(node > 0) if self.timed else 0.0) or _SHARE * self.passes
        if saved > takes + _READ * self.reading.unread * self.passes:
            return True
        if node or costs.idle <= costs.patience:
            return False
        costs.patience *= 2
        return True

    def ask(
        self, tree: TokenTree, nodes: Ordered[int], memory: Expectations, followed: Ordered[int], counted: Ordered[list]
    ) -> list[list[Offer]]:
        """What may follow each of some nodes, by the head and by what was counted, likeliest first."""
        begin, usual = perf_counter(), self.reading.unread <= _USUAL
        self.reading.skip(_WAITING)
        ids, said = self.reading.likeliest(tree, nodes, _WIDTH)
        found = []
        for node, tokens, chances in zip(nodes, ids.tolist(), said.tolist(), strict=True):
            head = dict(zip(tokens, chances, strict=True))
            place = memory.place(followed[node], counted[node])
            offers, self.told[node] = self.blending.blend(place, counted[node], head)
            found.append(offers)
        took = perf_counter() - begin
        if usual:
            self.costs.learn(nodes[0] > 0, took)
        self.spent, self.costs.idle = self.spent + took, 0
        return found

    def learn(self, path: Ordered[int], emitted: Ordered[int]) -> None:
        """What came behind the root and the accepted nodes."""
        with self.blending.lock:
            for node, token in zip((0, *path), emitted, strict=False):
                if (told := self.told.get(node)) is not None:
                    self.blending.learn(told, token)
