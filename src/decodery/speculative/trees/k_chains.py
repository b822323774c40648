"""SpecTr's drafts: several continuations, each drawn to its end on its own."""

from __future__ import annotations

from dataclasses import dataclass

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
    "k-chains",
    paper="SpecTr: Fast Speculative Decoding via Optimal Transport (2023)",
    guarantee="the output distribution is unchanged; siblings are independent draws",
    lossless=True,
)
@dataclass(frozen=True)
class KChains(TreePolicy):
    """Draws k continuations independent of each other and merges what they begin with.

    A node has a draw for each continuation that goes through it, so that the rule k-seq tests as many tokens as there
    are continuations still alive. Within the budget fewer of them are drawn before any is shortened. A pass per level.
    Greedy requests draft one chain.

    Attributes:
        k: Continuations drawn per step.
        length: Tokens of each.
    """

    k: int = 8
    length: int = 8

    provides = Provides(drafts=("sampled",))

    def __post_init__(self) -> None:
        if self.k < 1 or self.length < 1:
            raise SettingsError("k-chains needs k >= 1 and length >= 1")

    def largest(self) -> int:
        return self.k * self.length

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        growing = Growing(expander, seq, budget, self.origin)
        length = min(self.length, budget.depth, budget.nodes)
        # Nodes of the last level, and how many continuations go through each.
        alive = {0: min(self.k, budget.nodes // length) if growing.by_chance else 1}
        chains = tuple(range(alive[0]))
        yield from growing.read_ahead((Level(len(chains), chains), *[Level(1, chains)] * (length - 1)))
        for _ in range(length):
            frontier = growing.open(np.array(list(alive)))
            if not len(frontier):
                break
            if growing.by_chance:
                drawn = yield from growing.independent(frontier, max(alive[node] for node in frontier.tolist()))
            else:
                drawn = (yield from growing.children(frontier, 1))[0]
            below = [growing.merge(node, drawn[row, : alive[node]]) for row, node in enumerate(frontier.tolist())]
            alive = {node: draws.count(node) for draws in below for node in draws}
        return growing.finish()
