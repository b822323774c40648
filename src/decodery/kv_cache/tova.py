"""TOVA: keeps the tokens that the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.core.registry import register
from decodery.step.cache_policy import require_budget

from .evicting import Scored


@register(
    "tova",
    paper="Transformers are Multi-State RNNs (2024)",
    guarantee="lossy: tokens with little attention are dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class TOVA(Scored):
    """Drops the token that the current one attends to least, the same token for all heads of a layer.

    Attention is averaged over all heads of the layer. Any token may be dropped, even the current one. At the end of the
    prompt, the last row decides about all of its tokens at once. Class D. Memory: the budget, after the prompt is read.

    Attributes:
        budget: See `CachePolicy`; by default 1/8 of the text, as published.
    """

    kernels = True

    budget: float = 0.125

    def __post_init__(self) -> None:
        require_budget("tova", self.budget)

    @property
    def newest(self) -> bool:
        return True

    def read(self, scores: np.ndarray, paid: np.ndarray) -> np.ndarray:
        return np.broadcast_to(paid.mean(axis=0), scores.shape)

    def written(self, scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.broadcast_to(weights.mean(axis=(0, 1)), scores.shape)
