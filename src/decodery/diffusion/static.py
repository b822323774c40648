"""Static decoding: every pass writes the most confident proposals, a fixed number of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.noise import PLACE, draw, mix
from decodery.core.registry import register

from .base import Region
from .run import Run
from .scheduled import Scheduled
from .view import Commit, View


@register(
    "static",
    paper="Large Language Diffusion Models (2025)",
    guarantee="the model's own choice, one token a pass; with fewer steps tokens of one pass are chosen independently",
)
@dataclass(frozen=True)
class Static(Scheduled):
    """Writes the most confident proposals of every pass, by default one: the usual baseline.

    LLaDA calls this low-confidence remasking.

    Attributes:
        steps: Passes over the whole canvas, the same number for every block; None is one per token.
        schedule: How many tokens each pass writes: "even" as in LLaDA's released code, "dream" as in Dream's.
        alg_temp: Temperature at which positions are drawn by confidence, as in Dream's code; 0 takes the most confident
            ones.
    """

    alg_temp: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alg_temp < float("inf"):
            raise SettingsError(f"static: alg_temp must be 0 or more, not {self.alg_temp}")

    def begin(self, run: Run, region: Region) -> Any:
        return super().begin(run, region), mix(run.canvas.seed, PLACE, region[0])

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        due, seed = memory
        # A cache may have left fewer open positions in the pass than are due.
        count, left = (due[0] if due else 1), (due[1:], mix(seed, PLACE, 1))
        if not self.alg_temp:
            return view.top(count), left
        # The n largest scores with Gumbel noise are n draws without replacement.
        uniform = np.array([draw(seed, int(place)) for place in view.positions])
        scores = view.confidence / self.alg_temp - np.log(-np.log(uniform))
        return view.at(np.sort(np.lexsort((view.positions, -scores))[:count])), left
