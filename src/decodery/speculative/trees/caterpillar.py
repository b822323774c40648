"""Caterpillars: a chain of draws with siblings beside each, the more the less sure the drafter is."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

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

SURE = (0.95, 0.8, 0.5)
"""Above the first of these probabilities the fewest candidates stand at a place, below the last one the most."""


@register(
    "caterpillar",
    paper="SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (2024)",
    guarantee="the output distribution is unchanged; siblings are draws without replacement",
    lossless=True,
)
@dataclass(frozen=True)
class Caterpillar(TreePolicy):
    """Draws a chain, and beside each token as many others as the drafter's uncertainty allows.

    How many siblings there are depends on the token drawn before them, and never on theirs.

    Attributes:
        length: Of the chain, which also ends after the first token that was drawn with a probability below `stop`.
        stop: The chain ends after the first token with a lower probability.
        greedy, chance: How many candidates there are at a place, the chain's own included, where that token's
            probability is above 0.95, above 0.8, above 0.5, or lower; for greedy requests the most likely, for others
            draws without replacement.
        nodes: Of a tree at most, no bound in the paper. Only tokens of the chain have children, so that a tree takes
            one draft pass per level.
    """

    length: int = 25
    stop: float = 0.8
    greedy: tuple[int, ...] = (3, 5, 8, 10)
    chance: tuple[int, ...] = (1, 3, 5, 10)
    nodes: int = 80

    provides = Provides(drafts=("without-replacement",))

    def __post_init__(self) -> None:
        if min(self.length, self.nodes) < 1 or not 0 <= self.stop <= 1:
            raise SettingsError("caterpillar needs length and nodes >= 1 and stop between 0 and 1")
        if any(len(counts) != len(SURE) + 1 or min(counts) < 1 for counts in (self.greedy, self.chance)):
            raise SettingsError("caterpillar needs four numbers of candidates, each at least 1, as in greedy=3/5/8/10")

    def largest(self) -> int:
        return self.nodes

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        limits = Budget(min(self.nodes, budget.nodes), min(self.length, budget.depth))
        growing = Growing(expander, seq, limits, self.origin)
        counts = self.greedy if seq.request.sampler.greedy else self.chance
        tip = growing.open(np.zeros(1, dtype=np.int64))
        while growing.room and len(tip):
            ids, logq, _ = yield from growing.children(tip, max(counts))
            confidence = exp(logq[0, 0])
            count = min(counts[sum(confidence <= bound for bound in SURE)], growing.room, int((ids[0] >= 0).sum()))
            fresh = growing.add(tip.repeat(count), ids[0, :count])
            if confidence < self.stop:
                break
            tip = growing.open(fresh[:1])
        return growing.finish()
