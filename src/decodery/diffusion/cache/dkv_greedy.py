"""dKV-Cache's greedy variant: the order of writing is known, so a pass computes few rows beside those it writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from ..canvas import Canvas
from ..scheduled import shuffled
from .base import NOTHING, DiffusionCache, Kept, Plan, require_refresh


@register(
    "dkv-greedy",
    paper="dKV-Cache: The Cache for Diffusion Language Models (2025)",
    guarantee="exact at refresh=1; else most rows, open ones too, are read as earlier passes left them",
)
@dataclass(frozen=True)
class DKVGreedy(DiffusionCache):
    """Computes the position that is written, the last one written, and the open ones nearest to it.

    It requires `random`, whose order is known before a pass. The cost of a pass does not depend on the length of the
    canvas. Memory: keys and values of the canvas.

    Attributes:
        refresh: Passes from one that computes all rows to the next.
        window: Open positions that are computed beside the one that is written.
    """

    refresh: int = 2
    window: int = 4

    def __post_init__(self) -> None:
        require_refresh("refresh", self.refresh)
        if self.window < 0:
            raise SettingsError(f"dkv-greedy: window must be 0 or more open positions, not {self.window}")

    @property
    def requires_predictable_order(self) -> bool:
        return True

    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        order, left = shuffled(canvas.seed, region), canvas.open(*region)
        due = order[np.isin(order, left)][:1]
        if kept.passed == 0 or kept.age >= self.refresh:
            return Plan(np.arange(visible), NOTHING, due, fresh=True)
        others = left[left != due[0]]
        near = others[np.lexsort((others, np.abs(others - due[0])))[: self.window]]
        # The rows of the last pass were computed as masks; they are computed again as tokens.
        last = np.flatnonzero(canvas.written[:visible] == canvas.passes - 1)
        queries = np.unique(np.concatenate((due, near, last)))
        return Plan(queries, np.setdiff1d(np.arange(visible), queries), due)
