"""SnapKV: keeps the prompt tokens that the end of the prompt attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.cache_policy import require_budget

from .after_prompt import Compressing, Prompt, observing, pooled


@register(
    "snapkv",
    paper="SnapKV: LLM Knows What You are Looking for Before Generation (2024)",
    guarantee="lossy: most of the prompt is dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class SnapKV(Compressing):
    """Keeps the prompt tokens that its last tokens attend to, their neighbours, and those last tokens.

    It works well where the prompt ends with the question, and less well where the question comes in a later turn.
    Class B. Published settings: window 32, kernel 5 and mean, or 7 and max.

    Attributes:
        budget: See `CachePolicy`, of the prompt.
        window: Number of last tokens, at most half of the budget, whose attention to the others is summed over them and
            averaged over the heads of a group.
        kernel: Number of neighbouring tokens over which scores are pooled.
        pool: How scores are pooled, by mean or max.
    """

    budget: float = 1024
    window: int = 32
    kernel: int = 5
    pool: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        require_budget("snapkv", self.budget)
        require_window("snapkv", self.window, self.kernel, self.pool)

    def watched(self, prompt: int) -> int:
        return observing(self.window, self.budget, prompt)

    def scores(self, seen: Prompt) -> np.ndarray:
        return attended(seen, self.kernel, self.pool)


def require_window(name: str, window: int, kernel: int, pool: str) -> None:
    """Raise SettingsError unless window, kernel and pool are valid."""
    if window < 1 or kernel < 1 or kernel % 2 == 0 or pool not in ("mean", "max"):
        raise SettingsError(f"{name} needs window >= 1, an odd kernel >= 1 and a pool that is mean or max")


def attended(seen: Prompt, kernel: int, pool: str) -> np.ndarray:
    """[kv_heads, prompt] attention from the last rows to earlier tokens; inf for these rows themselves."""
    start = int(seen.at[0])
    scores = np.full(seen.keys.shape[:2], np.inf)
    if start:
        paid = seen.received()[..., :start].sum(dim=2).mean(dim=1)
        scores[:, :start] = pooled(paid, kernel, pool).double().cpu().numpy()
    return scores
