"""RSD-S: stochastic beam search, the sequences of every level drawn without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.level_choice import perturbed
from decodery.step.look_ahead import Level
from decodery.step.sequence import Sequence
from decodery.step.tree_drafter import TreeDrafter
from decodery.step.tree_policy import TreePolicy

from ..tree_building.growing import Growing


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
        widths = [min(self.width, (budget.nodes + levels - 1 - level) // levels) for level in range(levels)]
        yield from growing.read_ahead(tuple(Level(width, width) for width in widths))
        for width in widths:
            alive = np.isin(beam, growing.open(beam))
            beam, logq, values = beam[alive], logq[alive], values[alive]
            if not len(beam):
                break
            ids, conditional, scores = yield from growing.children(beam, width)
            paths = logq[:, None] + conditional
            reached = paths
            if growing.by_chance:
                reached = perturbed(*map(torch.from_numpy, (values, logq[:, None] + scores))).numpy()
            order = np.argsort(-reached, axis=None, kind="stable")[:width]
            # In row-major order again: siblings stay in the order they were drawn in.
            row, column = np.unravel_index(np.sort(order[np.isfinite(reached.flat[order])]), reached.shape)
            logq, values = paths[row, column], reached[row, column]
            beam = growing.add(beam[row], ids[row, column])
        return growing.finish()
