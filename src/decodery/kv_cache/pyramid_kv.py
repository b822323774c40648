"""PyramidKV: lower layers keep more of the prompt than higher ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.cache_policy import entries, require_budget

from .after_prompt import Compressing, Prompt, observing
from .snapkv import attended, require_window


@register(
    "pyramid-kv",
    paper="PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling (2024)",
    guarantee="lossy: most of the prompt is dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class PyramidKV(Compressing):
    """Keeps the prompt tokens that its last tokens attend to, with budgets that decrease by layer.

    Class B. All layers of a cache have the same capacity here, so the memory is that of the largest layer.

    Attributes:
        budget: See `CachePolicy`, of the prompt, the mean over the layers, the window included.
        beta: Steepness of the decrease: without the window, the last layer has 1 / beta of the mean budget, and the
            first one exceeds the mean by as much as the last one is below it.
        window: As in SnapKV.
        kernel: As in SnapKV.
        pool: As in SnapKV.
    """

    budget: float = 1024
    beta: float = 20.0
    window: int = 8
    kernel: int = 7
    pool: Literal["mean", "max"] = "max"

    def __post_init__(self) -> None:
        require_budget("pyramid-kv", self.budget)
        require_window("pyramid-kv", self.window, self.kernel, self.pool)
        if self.beta < 1:
            raise SettingsError(f"pyramid-kv: beta must be at least 1, not {self.beta}")

    def watched(self, prompt: int) -> int:
        return observing(self.window, self.budget, prompt)

    def scores(self, seen: Prompt) -> np.ndarray:
        return attended(seen, self.kernel, self.pool)

    def budgets(self, layers: int, length: int) -> list[int]:
        window = self.watched(length)
        mean = entries(self.budget, length) - window
        if mean <= 0 or layers == 1:
            return [mean + window] * layers
        least = mean / self.beta
        most = 2 * mean - least
        if most > length - window:
            most = float(length - window)
            least = 2 * mean - most
        line = np.linspace(most, least, layers)
        # Rounded so that no token is lost in the sum.
        ends = np.rint(np.cumsum(line)).astype(int)
        return (np.diff(ends, prepend=0) + window).tolist()
