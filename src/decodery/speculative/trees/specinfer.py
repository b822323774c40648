"""SpecInfer: independent draws per level, equal ones merged into one node."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.look_ahead import Level
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing


@register(
    "specinfer",
    paper="SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative Inference and "
    "Verification (2024)",
    guarantee="the output distribution is unchanged; siblings are independent draws",
    lossless=True,
)
@dataclass(frozen=True)
class SpecInfer(TreePolicy):
    """Draws a number of children per level independently and merges equal ones into one node.

    A token drawn twice is one node, whose second draw the rule still hears of. Within the budget, draws are given out
    level by level before they are made. Greedy requests take as many of the most likely tokens. Trees of several draft
    models: `fuse`.

    Attributes:
        expansion: Draws below every node by depth.
    """

    expansion: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if not self.expansion or min(self.expansion) < 1:
            raise SettingsError("specinfer needs at least one draw per node, as in expansion=1/1/3/1")

    def largest(self) -> int:
        return sum(prod(self.expansion[: level + 1]) for level in range(len(self.expansion)))

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        growing = Growing(expander, seq, budget, self.origin)
        yield from growing.read_ahead(self._plan(budget.nodes))
        frontier = np.zeros(1, dtype=np.int64)
        for draws in self.expansion:
            frontier = growing.open(frontier)[: growing.room]
            if not len(frontier):
                break
            # Every node of a level gets as many, so the first ones may not take what the last ones need.
            each = min(draws, growing.room // len(frontier))
            if growing.by_chance:
                drawn = yield from growing.independent(frontier, each)
                below = [growing.merge(node, row) for node, row in zip(frontier.tolist(), drawn, strict=True)]
                frontier = np.array([node for draws in below for node in dict.fromkeys(draws)])
            else:
                ids = (yield from growing.children(frontier, each))[0]
                row, column = np.nonzero(ids >= 0)
                frontier = growing.add(frontier[row], ids[row, column])
        return growing.finish()

    def _plan(self, room: int) -> tuple[Level, ...]:
        """What the levels of a tree of so many nodes read, where no token is drawn twice and none ends the text."""
        plan, nodes = list[Level](), 1
        for draws in self.expansion:
            if not room:
                break
            each = min(draws, room // nodes)
            room -= nodes * each
            nodes = min(nodes * each, room)
            plan.append(Level(each, tuple(range(nodes))))
        return tuple(plan)
