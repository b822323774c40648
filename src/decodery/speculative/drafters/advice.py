"""Who is asked what comes next only where the answer is worth the time it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from time import perf_counter

from decodery.core.abstract import Contract
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, as_coroutine
from decodery.step.sequence import Sequence

from ..stores.blending import Blending, Offer, Told
from ..stores.expectations import Expectations

WIDTH = 8
"""Most likely tokens of an adviser that are weighed."""
_TRIED = 5
"""Questions after which what they take is known."""
_FALLS, _RISES = 0.3, 0.03
_USUAL = 8
"""Tokens that are read for a question at most, for its time to tell of others: a prompt is read once."""
_PATIENCE = 32
"""Steps without a question after which one is asked whatever it seems worth: texts change. Twice as many each time."""

Opinion = tuple[list[list[int]], list[list[float]]]
"""The most likely tokens after each of some nodes, and their probabilities; 0 for a token that is none."""


@dataclass(slots=True)
class AskCosts:
    """Seconds of a question about the end of the text, after new text, and of one about nodes below it.

    0: unknown.

    Attributes:
        share: What a question is believed to take until then, in units of a pass.
        asked: How many there were of both.
        idle: Steps since the last one, in any text.
        patience: At most.
    """

    share: float
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
class Advice(Contract):
    """One text's adviser.

    Attributes:
        blending, costs: Common to all texts.
        told: By node, what was said in this step.
        spent: Seconds it took.
        passes: Seconds of a pass of this step without drafts.
        timed: Whether times are measured, and not given.
        sharers: How many texts share the passes that questions take.
    """

    blending: Blending
    costs: AskCosts
    told: dict[int, Told] = field(default_factory=dict)
    spent: float = 0.0
    passes: float = 0.0
    timed: bool = False
    sharers: int = 1

    @abstractmethod
    def reaches(self, depth: int) -> bool:
        """Whether it can say what follows a node this deep."""

    @abstractmethod
    def unread(self, seq: Sequence) -> int:
        """Tokens of the text that are to be read before anything can be said."""

    @abstractmethod
    def reading(self) -> float:
        """What each of them adds to a question, in seconds, over the questions that have the use of it."""

    @abstractmethod
    def likeliest(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> Opinion | ForwardCoroutine[Opinion]:
        """The `WIDTH` most likely tokens after each of `nodes`, and how likely they are."""

    def see(self, seq: Sequence, seen: VerificationFeedback) -> None:
        """A pass was scored."""

    def forget(self) -> None:
        """Give back what can be read again."""

    def begin(self, passes: float, timed: bool, sequences: int) -> None:
        """A step begins, which so many texts share."""
        self.passes, self.timed = passes, timed
        self.told, self.spent = {}, 0.0
        self.costs.idle += 1

    def takes(self, node: int) -> float:
        """Seconds of a question about a node, and of one about several."""
        known = self.costs.known(node > 0) if self.timed else 0.0
        return (known or self.costs.share * self.passes) / self.sharers

    def pays(self, seq: Sequence, node: int, saved: float) -> bool:
        """Whether to ask about a node and others, where what it says saves so many seconds on average."""
        costs = self.costs
        if saved > self.takes(node) + self.reading() * self.unread(seq):
            return True
        if node or costs.idle <= costs.patience:
            return False
        costs.patience *= 2
        return True

    def ask(
        self,
        seq: Sequence,
        tree: DraftTree,
        nodes: Ordered[int],
        memory: Expectations,
        followed: Ordered[int],
        counted: Ordered[list],
    ) -> ForwardCoroutine[list[list[Offer]]]:
        """What may follow each of some nodes, by the adviser and by what was counted, most likely first."""
        begin, usual = perf_counter(), self.unread(seq) <= _USUAL
        ids, said = yield from as_coroutine(self.likeliest(seq, tree, nodes))
        found = []
        for node, tokens, chances in zip(nodes, ids, said, strict=True):
            opinion = {token: chance for token, chance in zip(tokens, chances, strict=True) if chance > 0}
            place = memory.place(followed[node], counted[node])
            offers, self.told[node] = self.blending.blend(place, counted[node], opinion)
            found.append(offers)
        took = perf_counter() - begin
        # What others do meanwhile tells nothing.
        if usual and self.sharers == 1:
            self.costs.learn(nodes[0] > 0, took)
        self.spent, self.costs.idle = self.spent + took, 0
        return found

    def learn(self, path: Ordered[int], emitted: Ordered[int]) -> None:
        """What came after the root and the accepted nodes."""
        with self.blending.lock:
            for node, token in zip((0, *path), emitted, strict=False):
                if (told := self.told.get(node)) is not None:
                    self.blending.learn(told, token)
