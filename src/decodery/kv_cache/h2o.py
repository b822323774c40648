"""H2O: the tokens that got the most attention so far, and the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.cache_policy import require_budget

from .evicting import Scored, recent_and_best


@register(
    "h2o",
    paper="H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (2023)",
    guarantee="lossy: what got little attention is gone for good; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class H2O(Scored):
    """Keeps the tokens that received the most attention over all rows so far, and a recent window.

    A token's score is the attention paid to it by the prompt's rows and by those written since, averaged over the heads
    of a group; old tokens have had more rows to be paid by, which the paper leaves as it is. Class D. Memory: the
    budget, once the prompt is read, and one number a token and key-value head.

    Attributes:
        budget: See `CachePolicy`.
        recent: The share of the budget that is the window.
    """

    budget: float = 0.2
    recent: float = 0.5

    def __post_init__(self) -> None:
        require_budget("h2o", self.budget)
        if not 0 <= self.recent <= 1:
            raise SettingsError(f"recent of h2o is a share of the budget between 0 and 1, not {self.recent}")

    def chosen(self, scores: np.ndarray, layer: int, count: int) -> np.ndarray:
        return recent_and_best(scores, round(self.recent * count), count)
