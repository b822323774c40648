"""dKV-Cache: keys and values of written tokens, kept one pass late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.registry import register

from ..canvas import Canvas
from .base import DiffusionCache, Kept, Plan, require_refresh


@register(
    "dkv",
    paper="dKV-Cache: The Cache for Diffusion Language Models (2025)",
    guarantee="exact at refresh=1, unless the prompt is kept; else written tokens are read as they were one pass after "
    "they were written",
)
@dataclass(frozen=True)
class DKV(DiffusionCache):
    """Keeps written positions once computed as tokens and not as masks (published as Decode variant).

    Memory: keys and values of the canvas.

    Attributes:
        refresh: Passes of a block whose number, from 0 on, it divides compute everything again, as does pass 1: 0, 1,
            4, 8 and so on for 4.
        delayed: False keeps a token's row of the pass that wrote it, in which it was still a mask: worse, and here to
            be compared with.
        prompt: True computes the prompt once for the whole canvas, as in the published PD variant; the Prefill variant
            is `prefix` without a block.
    """

    refresh: int = 8
    delayed: bool = True
    prompt: bool = False

    def __post_init__(self) -> None:
        require_refresh("refresh", self.refresh)

    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        if kept.passed < 2 or kept.passed % self.refresh == 0:
            # What was read of the prompt by a model that is gone is gone too.
            first = canvas.prompt_length if self.prompt and len(kept.read) else 0
            return Plan(np.arange(first, visible), np.arange(first), fresh=True)
        # The next pass has the number `passes`: what the last one wrote is computed once more, now as a token.
        last = canvas.passes - (2 if self.delayed else 1)
        known = ~canvas.masked[:visible] & (canvas.written[:visible] <= last)
        return Plan(np.flatnonzero(~known), np.flatnonzero(known))
