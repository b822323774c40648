"""Window-Diffusion: a window of open places is computed, some more are read, and what lies beyond is left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from ..canvas import Canvas
from .base import NOTHING, DiffusionCache, Kept, Plan, require_refresh


@register(
    "window",
    paper="Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching "
    "(2026)",
    guarantee="exact where both windows hold the whole canvas and refresh=1; else open places far ahead are left out "
    "and the others read as the last fresh pass left them",
)
@dataclass(frozen=True)
class Window(DiffusionCache):
    """Computes the first open places and what was written lately, reads what is before and a little ahead.

    The released code for LLaDA lets such a pass see the whole canvas, that for Dream lets it write one token; here it
    sees the outer window and may write the inner one. Memory: keys and values of the prompt, of what is written and of
    the outer window.

    Attributes:
        inner: Open places that are computed and may be written.
        outer: Those that are there at all.
        refresh: Passes from one that computes all that is there to the next.
    """

    inner: int = 16
    outer: int = 64
    refresh: int = 32

    def __post_init__(self) -> None:
        require_refresh("refresh", self.refresh)
        if not 1 <= self.inner <= self.outer:
            raise SettingsError(f"window needs 1 <= inner <= outer, not inner={self.inner} and outer={self.outer}")

    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        active, written = canvas.open(*region)[: self.inner], ~canvas.masked[:visible]
        known = active[np.isin(active, kept.read)]
        if kept.passed == 0 or kept.age >= self.refresh or not len(known):
            ahead = canvas.open(0, visible)[: self.outer]
            return Plan(np.union1d(np.flatnonzero(written), ahead), NOTHING, active, fresh=True)
        # What a phase has written stays among the rows that are computed: its state still moves.
        queries = np.union1d(known, np.flatnonzero(written & (canvas.written[:visible] >= kept.start)))
        return Plan(queries, np.setdiff1d(kept.read, queries), known)
