"""Top-k: only the k most probable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_count
from .masks import keep


@register("top-k", paper="Hierarchical Neural Story Generation (2018)", guarantee="lossy; k=0 is the identity")
@dataclass(frozen=True)
class TopK(LogitsProcessor):
    """Keeps the tokens whose logit is at least the k-th largest; ties at the border are all kept.

    Attributes:
        k: Number of tokens; 0, or at least the size of the vocabulary, keeps all.
    """

    k: int = 50
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_count("top-k", self.k)

    @property
    def neutral(self) -> bool:
        return self.k == 0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral or self.k >= logits.shape[-1]:
            return logits
        if logits.device.type != "cpu":
            border = logits.topk(self.k, dim=-1).values[:, -1:]
            return logits.masked_fill(logits < border, -torch.inf)
        return keep(logits, (_largest(row, self.k) for row in logits.numpy()))


def _largest(row: np.ndarray, k: int) -> np.ndarray:
    """Ids of the entries no smaller than the k-th largest, selected among those near the top."""
    top = row.max()
    for distance in (5.0, 10.0, 20.0, np.inf):
        ids = np.flatnonzero(row >= top - distance)
        if len(ids) >= k:
            break
    values = row[ids]
    return ids[values >= np.partition(values, len(ids) - k)[len(ids) - k]]
