"""Base class of policies that fill a canvas in a fixed number of passes."""

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
        steps: Passes over the whole canvas; None is one per token.
        schedule: How many tokens each pass writes: "even" as in LLaDA, "dream" as in Dream's code.
    """

    steps: int | None = None
    schedule: Literal["even", "dream"] = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in ("even", "dream"):
            raise SettingsError(f"schedule must be even or dream, not {self.schedule!r}")
        if self.steps is not None and self.steps < 1:
            raise SettingsError(f"steps must be 1 or more, not {self.steps}")

    def begin(self, run: Run, region: Region) -> Any:
        """How many tokens each pass over the region writes."""
        masks, length = len(run.canvas.open(*region)), len(run.canvas) - run.canvas.prompt_length
        if self.steps is None:
            return (1,) * masks if self.schedule == "even" else dream_quotas(masks, masks)
        share, rest = divmod(self.steps * (region[1] - region[0]), length)
        if rest or not share:
            raise SettingsError(
                f"{self.steps} passes cannot be divided evenly among blocks of {region[1] - region[0]} of {length} "
                "tokens: give a multiple of the number of blocks"
            )
        return quotas(masks, share) if self.schedule == "even" else dream_quotas(masks, share)


def quotas(masks: int, steps: int) -> tuple[int, ...]:
    """How many of `masks` positions each of `steps` passes fills, as evenly as possible, larger first."""
    each, more = divmod(masks, steps)
    return tuple(n for n in (each + (step < more) for step in range(steps)) if n)


def dream_quotas(masks: int, steps: int) -> tuple[int, ...]:
    """How many positions each pass fills in Dream's code: the floor of (1 - t' / t) of the open ones.

    Times t decrease evenly from 1 to 0.001; the last pass writes the rest. Passes without a token to write are left
    out.
    """
    times, found, left = np.linspace(1, 1e-3, steps + 1), list[int](), masks
    for step in range(steps):
        found.append(left if step == steps - 1 else int(left * (1 - times[step + 1] / times[step])))
        left -= found[-1]
    return tuple(n for n in found if n)


def shuffled(seed: int, region: Region) -> np.ndarray:
    """[n] the positions of a region in an order that depends only on the seed."""
    return region[0] + np.argsort([draw(seed, place, stream=PLACE) for place in range(*region)])
