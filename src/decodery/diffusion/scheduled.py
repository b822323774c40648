"""Filling a canvas in a number of passes that is known before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.noise import PLACE, draw

from .base import Region, UnmaskingPolicy
from .run import Run

__all__ = ["Scheduled", "quotas", "shuffled"]


@dataclass(frozen=True)
class Scheduled(UnmaskingPolicy):
    """A policy whose passes write a fixed number of tokens.

    Attributes:
        steps: Over the whole canvas; None is one a token.
        schedule: "even" shares tokens out as LLaDA does, "dream" as Dream's code does.
    """

    steps: int | None = None
    schedule: Literal["even", "dream"] = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in ("even", "dream"):
            raise SettingsError(f"a schedule is even or dream, not {self.schedule!r}")
        if self.steps is not None and self.steps < 1:
            raise SettingsError(f"a canvas is filled in at least one pass: give steps of 1 or more, not {self.steps}")

    def begin(self, run: Run, region: Region) -> Any:
        """How many tokens each pass over the region writes."""
        masks, length = len(run.canvas.open(*region)), len(run.canvas) - run.canvas.prompt_length
        if self.steps is None:
            return (1,) * masks if self.schedule == "even" else dream_quotas(masks, masks)
        share, rest = divmod(self.steps * (region[1] - region[0]), length)
        if rest or not share:
            raise SettingsError(
                f"{self.steps} passes cannot be shared out over blocks of {region[1] - region[0]} of {length} tokens: "
                "give as many for each block"
            )
        return quotas(masks, share) if self.schedule == "even" else dream_quotas(masks, share)


def quotas(masks: int, steps: int) -> tuple[int, ...]:
    """How many of `masks` positions each of `steps` passes fills, as evenly as possible, larger first."""
    each, more = divmod(masks, steps)
    return tuple(n for n in (each + (step < more) for step in range(steps)) if n)


def dream_quotas(masks: int, steps: int) -> tuple[int, ...]:
    """The same by Dream's code: the integer part of (1 - t' / t) of what is left.

    Times t fall evenly from 1 to 0.001; the last pass writes the rest. Passes that this leaves nothing to write change
    nothing and are left out.
    """
    times, found, left = np.linspace(1, 1e-3, steps + 1), list[int](), masks
    for step in range(steps):
        found.append(left if step == steps - 1 else int(left * (1 - times[step + 1] / times[step])))
        left -= found[-1]
    return tuple(n for n in found if n)


def shuffled(seed: int, region: Region) -> np.ndarray:
    """[n] the positions of a region in an order that the seed alone decides."""
    return region[0] + np.argsort([draw(seed, place, stream=PLACE) for place in range(*region)])
