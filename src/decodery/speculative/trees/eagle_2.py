"""EAGLE-2's dynamic tree: expand the most likely nodes of every layer, then keep the most likely of all."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.layers import grow_layers


@register(
    "eagle-2",
    paper="EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (2024)",
    guarantee="the output distribution is unchanged; siblings are deterministic, which every rule verifies",
    lossless=True,
)
@dataclass(frozen=True)
class EAGLE2(TreePolicy):
    """Expands the `width` most likely nodes of each of `depth` layers; keeps the `nodes` best of all.

    A node's value is the product of the drafter's probabilities along its path, at temperature 1 whatever the request's
    is: it only ranks. Of equal values the shallower node is kept, and a path is never worth more than its beginning, so
    that what is kept is a tree. Cost: `depth` draft passes over at most `width` new nodes; nodes that no kept node
    could descend from are not expanded, which changes nothing but the cost.

    Attributes:
        nodes: Drafted tokens per step.
        width: Nodes expanded per level, and children of each.
        depth: Levels, a draft pass each.
    """

    nodes: int = 60
    width: int = 10
    depth: int = 6

    def __post_init__(self) -> None:
        if min(self.nodes, self.width, self.depth) < 1:
            raise SettingsError("eagle-2 needs nodes, width and depth >= 1")

    def largest(self) -> int:
        return self.nodes

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        layers = yield from grow_layers(expander, seq, width=self.width, depth=depth, kept=nodes, shaped=False)
        return layers.kept(nodes)
