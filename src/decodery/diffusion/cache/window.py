"""Window-Diffusion: an inner window of open positions is computed, an outer one is reused, the rest is left out."""

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
    """Computes the first open positions and recent tokens; reuses other positions up to a window's end.

    Here a pass attends to the outer window and may write all of the inner one. In the released code for LLaDA it
    attends to the whole canvas; in that for Dream it writes one token. Memory: keys and values of the prompt, of
    written tokens and of the outer window.

    Attributes:
        inner: Open positions that are computed and may be written.
        outer: Open positions that a pass holds at all.
        refresh: Passes from one that computes all rows it holds to the next.
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
        # Tokens written since the last fresh pass are computed in every pass: their states still change.
        queries = np.union1d(known, np.flatnonzero(written & (canvas.written[:visible] >= kept.start)))
        return Plan(queries, np.setdiff1d(kept.read, queries), known)
