"""The dual cache of Fast-dLLM: rows before and after a block are computed once per block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.registry import register

from ..canvas import Canvas
from .base import NOTHING, DiffusionCache, Kept, Plan, require_refresh


@register(
    "dual",
    paper="Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025)",
    guarantee="exact at refresh=1; else all but the block is read as its first pass left it",
)
@dataclass(frozen=True)
class Dual(DiffusionCache):
    """Computes all rows in the first pass of a block, and then only those of the block.

    Memory: keys and values of the canvas.

    Attributes:
        refresh: Passes from one that computes all rows to the next; None computes them only at the next block.
    """

    refresh: int | None = None

    def __post_init__(self) -> None:
        require_refresh("refresh", self.refresh)

    @property
    def steady(self) -> bool:
        return self.refresh is None

    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        if kept.passed == 0 or kept.age == self.refresh:
            return Plan(np.arange(visible), NOTHING, fresh=True)
        start, end = region
        return Plan(np.arange(start, end), np.concatenate((np.arange(start), np.arange(end, visible))))
