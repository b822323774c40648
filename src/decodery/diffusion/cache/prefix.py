"""The prefix cache of Fast-dLLM: rows before a block are computed once per block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.registry import register

from ..canvas import Canvas
from .base import DiffusionCache, Kept, Plan, require_refresh


@register(
    "prefix",
    paper="Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (2025)",
    guarantee="exact at refresh=1, and where rows see nothing of later blocks; elsewhere what stands before a block is "
    "read as its first pass left it",
)
@dataclass(frozen=True)
class Prefix(DiffusionCache):
    """Computes all rows in the first pass of a block, and then only those from the block's start.

    Where rows do not attend to later blocks, finished blocks are never computed again. Memory: keys and values of the
    canvas.

    Attributes:
        refresh: Passes from one that computes all rows to the next; None computes them only at the next block.
    """

    refresh: int | None = None

    def __post_init__(self) -> None:
        require_refresh("refresh", self.refresh)

    @property
    def steady(self) -> bool:
        return self.refresh is None

    @property
    def causal(self) -> bool:
        return True

    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        due = kept.passed == 0 or kept.age == self.refresh
        first = (0 if due else region[0]) if kept.final is None else kept.final
        return Plan(np.arange(first, visible), np.arange(first), fresh=due)
