"""Clover's dynamic selection: a small number of nodes, spent level by level on likely children."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing


@register(
    "clover",
    paper="Clover: Regressive Lightweight Speculative Decoding with Sequential Knowledge (2024)",
    guarantee="the output distribution is unchanged; siblings are deterministic, which every rule verifies",
    lossless=True,
)
@dataclass(frozen=True)
class Selection(TreePolicy):
    """Keeps every node's likely children, and goes a level deeper while any of the `nodes` are left.

    Children are likely within the first `top_p` of their parent's probability, and where they have at least `ratio` of
    what its most likely child has. A level that has more of them than nodes are left keeps its most likely paths, and
    is the last. Unlike eagle-2, nothing is drafted that is thrown away again: a draft pass per level, over its nodes.

    Attributes:
        nodes: Drafted tokens per step.
        top_p: Children are kept within this share of their parent's probability.
        ratio: Children need at least this share of the most likely sibling's probability.
    """

    nodes: int = 4
    top_p: float = 0.95
    ratio: float = 0.25

    def __post_init__(self) -> None:
        if self.nodes < 1 or not 0 < self.top_p <= 1 or not 0 <= self.ratio <= 1:
            raise SettingsError("clover needs nodes >= 1, top_p above 0 and at most 1, and ratio from 0 to 1")

    def largest(self) -> int:
        return self.nodes

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        growing = Growing(expander, seq, Budget(min(self.nodes, budget.nodes), budget.depth), self.origin)
        level, scores = np.zeros(1, dtype=np.int64), np.zeros(1)
        while growing.room and len(nodes := growing.open(level)):
            ids, logq, _ = yield from growing.children(nodes, growing.room)
            chances = np.exp(logq)
            before = np.cumsum(chances, axis=1) - chances
            likely = (ids >= 0) & (before < self.top_p) & (chances >= self.ratio * chances[:, :1])
            parents, ranks = np.nonzero(likely)
            reached = scores[nodes[parents]] + logq[parents, ranks]
            best = np.argsort(-reached, kind="stable")[: growing.room]
            level = growing.add(nodes[parents[best]], ids[parents[best], ranks[best]])
            scores = np.concatenate((scores, reached[best]))
        return growing.finish()
