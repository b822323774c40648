"""Random order: positions are filled in an order that does not depend on the proposals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.registry import register

from .base import Region
from .run import Run
from .scheduled import Scheduled, shuffled
from .view import Commit, View


@register(
    "random",
    paper="Large Language Diffusion Models (2025)",
    guarantee="the model's own distribution at temperature 1, one token a pass; with fewer steps tokens of one pass "
    "are drawn independently",
)
@dataclass(frozen=True)
class Random(Scheduled):
    """Writes positions in an order that the seed decides, by default one per pass.

    Attributes:
        steps: Passes over the whole canvas, the same number for every block; None is one per token.
        schedule: How many tokens each pass writes: "even", or "dream" as in Dream's code.
    """

    @property
    def predictable_order(self) -> bool:
        return self.steps is None and self.schedule == "even"

    def begin(self, run: Run, region: Region) -> Any:
        return shuffled(run.canvas.seed, region), super().begin(run, region)

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        order, due = memory
        found = order[np.isin(order, view.positions)][: due[0] if due else 1]
        return view.at(np.isin(view.positions, found)), (order, due[1:])
