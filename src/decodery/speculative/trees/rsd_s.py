"""RSD-S: stochastic beam search, the sequences of every level drawn without replacement."""

from __future__ import annotations

from dataclasses import dataclass

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


def perturbed(above: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """Gumbel-perturbed log-probabilities of children; each row's maximum equals its parent's.

    Source: Stochastic Beams and Where to Find Them (2019), appendix B.

    Args:
        above: [m], the parents'.
        reached: [m, k], the children's own perturbed values, unconditioned, falling along rows.

    Returns:
        [m, k], row maxima equal to `above`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        v = above[:, None] - reached + np.log1p(-np.exp(reached - reached[:, :1]))
        found = above[:, None] - np.maximum(v, 0.0) - np.log1p(np.exp(-np.abs(v)))
    return np.where(np.isfinite(reached), found, -np.inf)


@register(
    "rsd-s",
    paper="Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement (2024)",
    guarantee="the output distribution is unchanged; siblings are draws without replacement",
    lossless=True,
)
@dataclass(frozen=True)
class RSDS(TreePolicy):
    """Draws the sequences of every level without replacement (stochastic beam search), a pass per level.

    Every level keeps the sequences of greatest perturbed log-probability; children of one parent stand by falling
    values, which is the order they were drawn in. A smaller budget is shared out among the levels before anything is
    drawn. Greedy requests search with a plain beam.

    Attributes:
        width: Sequences per level.
        depth: Levels.
    """

    width: int = 6
    depth: int = 5

    provides = Provides(drafts=("without-replacement",))

    def __post_init__(self) -> None:
        if min(self.width, self.depth) < 1:
            raise SettingsError("rsd-s needs width and depth >= 1")

    def largest(self) -> int:
        return self.width * self.depth

    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        levels = min(self.depth, budget.depth, budget.nodes)
        growing = Growing(expander, seq, budget, self.origin)
        beam, logq, values = np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1)
        for level in range(levels):
            width = min(self.width, (budget.nodes + levels - 1 - level) // levels)
            alive = np.isin(beam, growing.open(beam))
            beam, logq, values = beam[alive], logq[alive], values[alive]
            if not len(beam):
                break
            ids, conditional, scores = yield from growing.children(beam, width)
            paths = logq[:, None] + conditional
            reached = perturbed(values, logq[:, None] + scores) if growing.by_chance else paths
            order = np.argsort(-reached, axis=None, kind="stable")[:width]
            # In row-major order again: siblings stay in the order they were drawn in.
            row, column = np.unravel_index(np.sort(order[np.isfinite(reached.flat[order])]), reached.shape)
            logq, values = paths[row, column], reached[row, column]
            beam = growing.add(beam[row], ids[row, column])
        return growing.finish()
