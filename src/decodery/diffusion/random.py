"""Random order: places are filled in an order that does not depend on what is proposed for them."""

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
    """Writes places in an order that the seed decides, by default one a pass.

    Attributes:
        steps: Passes over the whole canvas, as many for every block; None is one a token.
        schedule: "even", or "dream" as Dream's code shares them out.
    """

    @property
    def foretold(self) -> bool:
        return self.steps is None and self.schedule == "even"

    def begin(self, run: Run, region: Region) -> Any:
        return shuffled(run.canvas.seed, region), super().begin(run, region)

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        order, due = memory
        found = order[np.isin(order, view.positions)][: due[0] if due else 1]
        return view.at(np.isin(view.positions, found)), (order, due[1:])
