"""Static decoding: the most confident proposals are written, as many in every pass."""

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
    guarantee="the model's own choice, one token a pass; with fewer steps tokens of one pass do not know of each other",
)
@dataclass(frozen=True)
class Static(Scheduled):
    """Writes the most confident proposals of every pass, by default one: the usual baseline.

    LLaDA calls this low-confidence remasking; schedule "even" shares the steps out as its released code does, "dream"
    as Dream's.

    Attributes:
        steps: Passes over the whole canvas, as many for every block; None is one a token.
        alg_temp: Temperature of the confidences by which positions are drawn, as in Dream's code; 0 takes the most
            confident ones.
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
        # A cache may have offered fewer places than were due.
        count, left = (due[0] if due else 1), (due[1:], mix(seed, PLACE, 1))
        if not self.alg_temp:
            return view.top(count), left
        # The n largest scores with Gumbel noise are n draws without replacement.
        uniform = np.array([draw(seed, int(place)) for place in view.positions])
        scores = view.confidence / self.alg_temp - np.log(-np.log(uniform))
        return view.at(np.sort(np.lexsort((view.positions, -scores))[:count])), left
