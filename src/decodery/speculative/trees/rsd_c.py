"""RSD-C: a constant number of children per level, drawn without replacement."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing
from ..tree_building.template import constant


@register(
    "rsd-c",
    paper="Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement (2024)",
    guarantee="the output distribution is unchanged; siblings are draws without replacement",
    lossless=True,
)
@dataclass(frozen=True)
class RSDC(TreePolicy):
    """Draws a constant number of children per level without replacement (Gumbel top-k), a pass a level.

    Siblings stand by falling log-probability plus Gumbel noise, which is the order they were drawn in. A smaller budget
    cuts places of the tree, never tokens: those deep and late in draw order first. Greedy requests take the most likely
    tokens.

    Attributes:
        branching: Children of every node by depth.
    """

    branching: tuple[int, ...] = (2, 2, 2)

    provides = Provides(drafts=("without-replacement",))

    def __post_init__(self) -> None:
        constant("rsd-c", self.branching)

    def largest(self) -> int:
        return len(constant("rsd-c", self.branching))

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        shape = constant("rsd-c", self.branching).within(budget.nodes, budget.depth)
        return (yield from Growing(expander, seq, budget, self.origin).fill(shape))
