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
    """Reuses a written position after one pass computed it as a token (published as the Decode variant).

    Memory: keys and values of the canvas.

    Attributes:
        refresh: Interval of the passes that compute all rows. Passes of a block are counted from 0, and pass 1 does so
            too: for 4 these are the passes 0, 1, 4, 8 and so on.
        delayed: False reuses the row of the pass that wrote the token, in which it was still a mask. It is less
            accurate, and serves as the paper's comparison.
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
            # After a hand-off to another model, the prompt is computed again.
            first = canvas.prompt_length if self.prompt and len(kept.read) else 0
            return Plan(np.arange(first, visible), np.arange(first), fresh=True)
        # The next pass has the number `passes`. Rows that the last one wrote are computed again, now as tokens.
        last = canvas.passes - (2 if self.delayed else 1)
        known = ~canvas.masked[:visible] & (canvas.written[:visible] <= last)
        return Plan(np.flatnonzero(~known), np.flatnonzero(known))
