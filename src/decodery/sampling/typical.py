"""Typical sampling: tokens about as surprising as the model expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.registry import register

from .entropy import entropy
from .logits_processor import Context, LogitsProcessor, Stage, require_number
from .masks import keep
from .prefix import smallest_prefix


@register("typical", paper="Locally Typical Sampling (2022)", guarantee="lossy; mass=1 is the identity")
@dataclass(frozen=True)
class Typical(LogitsProcessor):
    """Keeps the tokens whose surprise is nearest to the entropy, the fewest with a given mass.

    Tokens as far from the entropy as the last one needed are all kept. The most probable token may be dropped; this is
    intended by the method.

    Attributes:
        mass: A share above 0, up to 1.
    """

    mass: float = 0.95
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("typical", self.mass, above=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.mass == 1.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        log_probs = logits.log_softmax(dim=-1)
        expected = entropy(log_probs)
        if logits.device.type != "cpu":
            return _keep_nearest(logits, log_probs, expected, self.mass)
        rows = zip(log_probs.numpy(), expected.view(-1).tolist(), strict=True)
        return keep(logits, (_typical_set(*row, self.mass) for row in rows))


def _typical_set(log_probs: np.ndarray, expected: float, mass: float) -> np.ndarray:
    """Ids of the typical set, found among the tokens within some reach of the entropy that holds enough."""
    far = np.abs(-log_probs - np.float32(expected))
    for reach in (2.0, 8.0, np.inf):
        ids = np.flatnonzero(far < reach)
        weights = np.exp(log_probs[ids])
        if weights.sum(dtype=np.float64) >= mass:
            break
    farthest, _ = smallest_prefix(far[ids], weights, mass)
    return ids[far[ids] <= farthest]


def _keep_nearest(logits: torch.Tensor, log_probs: torch.Tensor, expected: torch.Tensor, mass: float) -> torch.Tensor:
    """The same by a full sort, without waiting for the device."""
    far = (-log_probs - expected.float()).abs()
    ordered, ids = far.sort(dim=-1)
    held = log_probs.exp().gather(-1, ids).cumsum(dim=-1, dtype=torch.float64)
    last = (held < mass).sum(dim=-1, keepdim=True).clamp_max(logits.shape[-1] - 1)
    return logits.masked_fill(far > ordered.gather(-1, last), -torch.inf)
