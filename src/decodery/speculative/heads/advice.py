"""A head as an adviser: it goes on from states that the text's own passes have shown."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from weakref import ref

from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import VerificationFeedback
from decodery.step.sequence import Sequence

from ..drafters.advice import WIDTH, Advice, AskCosts, Opinion
from ..drafters.adviser_record import remembered
from ..stores.blending import Blending
from .found import identity
from .grown import DraftHead
from .head import TrainedHead
from .reading import HeadReading

_SHARE = 0.08
"""What a question is believed to take, in units of a pass, until it is measured."""
_READ = 0.002
"""What every token adds that has to be read first, in units of a pass, over the questions that have the use of it."""
_WAITING = 128
"""Tokens that wait to be read at most. A head that is asked for the first time reads the end of a long prompt alone."""


@dataclass(slots=True)
class HeadAdvice(Advice):
    """One text's head, which needs no pass.

    Attributes:
        head: What it has read.
        stale: Whether the text has grown by steps whose states were not shown.
    """

    head: HeadReading = field(kw_only=True)
    stale: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, seq: Sequence, trained: TrainedHead, head: DraftHead) -> HeadAdvice:
        """Nothing read yet.

        Args:
            head: The trained one beside the text's model.
        """

        def make() -> tuple[Blending, AskCosts]:
            return Blending(), AskCosts(_SHARE, recalled=remembered(seq.request.model, identity(trained)))

        # Two heads are two opinions, and so are those of greedy texts and of drawn ones.
        key = ("auto", "head", ref(trained), seq.request.sampler.greedy)
        blending, costs = seq.request.memory.recall("process", seq, key, make)
        return cls(blending, costs, head=HeadReading.begin(head))

    def see(self, seq: Sequence, seen: VerificationFeedback) -> None:
        """Take the states of what became text, to be read when needed."""
        self.head.see(seq, seen)
        self.stale = False
        # Now and then, since what is left has to be copied.
        if self.head.unread > 2 * _WAITING:
            self.head.skip(_WAITING)

    def pass_over(self, steps: int, tokens: int, passes: float, seconds: float) -> None:
        Advice.pass_over(self, steps, tokens, passes, seconds)
        # What these steps wrote stays unread; the states of the next one are what it goes on from.
        self.stale = True

    def reaches(self, depth: int) -> bool:
        return not self.stale and not self.head.empty and depth < self.head.head.reach

    def unread(self, seq: Sequence) -> int:
        return self.head.unread

    def reading(self, tokens: int) -> float:
        return _READ * self.passes * tokens

    def most_likely(self, seq: Sequence, tree: DraftTree, nodes: Ordered[int]) -> Opinion:
        self.head.skip(_WAITING)
        return self.head.most_likely(tree, nodes, WIDTH)
