"""H2O: keeps the tokens that received the most attention so far, and the last ones."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.cache_policy import require_budget

from .evicting import Scored


@register(
    "h2o",
    paper="H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (2023)",
    guarantee="lossy: tokens with little attention are dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class H2O(Scored):
    """Keeps the tokens that received the most attention over all rows so far, and a recent window.

    A token's score is the sum of the attention that it received from the rows of the prompt and from later rows,
    averaged over the heads of a group. As in the paper, this favours old tokens, which received attention from more
    rows. Class D. Memory: the budget, after the prompt is read, and one score per token and key-value head.

    Attributes:
        budget: See `CachePolicy`.
        recent: Share of the budget for the window of recent tokens.
    """

    kernels = True

    budget: float = 0.2
    recent: float = 0.5

    def __post_init__(self) -> None:
        require_budget("h2o", self.budget)
        if not 0 <= self.recent <= 1:
            raise SettingsError(f"h2o: recent must be a share of the budget from 0 to 1, not {self.recent}")

    def protected(self, count: int) -> tuple[int, int]:
        return 0, round(self.recent * count)
