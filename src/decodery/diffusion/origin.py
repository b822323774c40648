"""Dream's `origin`: open positions to write are drawn at random, independent of their confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.noise import PASS, draw, mix
from decodery.core.registry import register

from .base import Region
from .run import Run
from .scheduled import Scheduled
from .view import Commit, View

_EPS = 1e-3
"""Last of Dream's time steps; the first is 1."""


@register(
    "origin",
    paper="Dream 7B: Diffusion Large Language Models (2025)",
    guarantee="the reverse process of masked diffusion with as many time steps; tokens of one step are drawn "
    "independently",
)
@dataclass(frozen=True)
class Origin(Scheduled):
    """Writes each open position with probability 1 - t' / t, where t' is the time after t.

    The `steps` times decrease evenly from 1 to 0.001. The last step writes all open positions. Steps that write no
    token need no pass, and their passes are left out.

    Attributes:
        steps: Time steps over the whole canvas, the same number for every block; None is one per token.
    """

    def begin(self, run: Run, region: Region) -> Any:
        due, length = super().begin(run, region), len(run.canvas) - run.canvas.prompt_length
        steps = sum(due) if self.steps is None else self.steps * (region[1] - region[0]) // length
        return run.canvas.seed, 0, steps

    def select(self, view: View, memory: Any) -> tuple[Commit, Any]:
        seed, step, steps = memory
        times = np.linspace(1, _EPS, steps + 1)
        while step < steps - 1:
            own = mix(seed, PASS, step)
            chances = np.array([draw(own, int(place)) for place in view.positions])
            step += 1
            if (found := chances < 1 - times[step] / times[step - 1]).any():
                return view.at(found), (seed, step, steps)
        return view.at(np.ones(len(view), dtype=bool)), (seed, steps, steps)
