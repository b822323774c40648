"""Top-k: only the k most probable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..registry import register
from .base import Context, Stage, Warp, require_count


@register(
    "top-k", paper="Hierarchical Neural Story Generation (2018)", guarantee="lossy; k=0 is the identity"
)
@dataclass(frozen=True)
class TopK(Warp):
    """Keeps the tokens whose logit is at least the k-th largest; equals at the border all stay.

    k: a count; 0, or the size of the vocabulary and more, keeps everything.
    """

    k: int = 50
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_count("top-k", self.k)

    @property
    def neutral(self) -> bool:
        return self.k == 0

    def warp(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or self.k >= logits.shape[-1]:
            return logits
        border = logits.topk(self.k, dim=-1, sorted=True).values[:, -1:]
        return logits.masked_fill(logits < border, -torch.inf)
