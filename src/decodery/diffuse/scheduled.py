"""Filling a canvas in a number of passes that is known before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.noise import PLACE, draw
from ..errors import SettingsError
from .base import Policy, Region
from .run import Run

__all__ = ["Scheduled", "quotas", "shuffled"]


@dataclass(frozen=True)
class Scheduled(Policy):
    """A policy whose passes write a fixed number of tokens. steps: over the whole canvas; None is one a token."""

    steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps < 1:
            raise SettingsError(f"a canvas is filled in at least one pass: give steps of 1 or more, not {self.steps}")

    def begin(self, run: Run, region: Region) -> Any:
        """How many tokens each pass over the region writes."""
        masks, length = len(run.canvas.open(*region)), len(run.canvas) - run.canvas.prompt_length
        if self.steps is None:
            return (1,) * masks
        share, rest = divmod(self.steps * (region[1] - region[0]), length)
        if rest or not share:
            raise SettingsError(
                f"{self.steps} passes cannot be shared out over blocks of {region[1] - region[0]} of {length} tokens: "
                "give as many for each block"
            )
        return quotas(masks, share)


def quotas(masks: int, steps: int) -> tuple[int, ...]:
    """How many of `masks` places each of `steps` passes fills: as evenly as whole numbers go, the larger ones first."""
    each, more = divmod(masks, steps)
    return tuple(n for n in (each + (step < more) for step in range(steps)) if n)


def shuffled(seed: int, region: Region) -> np.ndarray:
    """[n] the positions of a region in an order that the seed alone decides."""
    return region[0] + np.argsort([draw(seed, place, stream=PLACE) for place in range(*region)])
