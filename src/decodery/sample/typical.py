"""Typical sampling: tokens about as surprising as the model expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..registry import register
from .base import Context, Stage, Warp, require_number
from .entropy import entropy


@register("typical", paper="Locally Typical Sampling (2022)", guarantee="lossy; mass=1 is the identity")
@dataclass(frozen=True)
class Typical(Warp):
    """Keeps the tokens whose surprise is nearest to the entropy, as few as hold a given mass.

    mass: a share above 0, up to 1. Tokens equally far from the entropy as the last one needed all stay. The
    most probable token may be dropped, which is the point of the method.
    """

    mass: float = 0.95
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("typical", self.mass, above=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.mass == 1.0

    def warp(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        log_probs = logits.log_softmax(dim=-1)
        expected = entropy(log_probs)
        if logits.device.type != "cpu":
            return _keep_nearest(logits, log_probs, expected, self.mass)
        kept = torch.full_like(logits, -torch.inf)
        rows = zip(
            logits.numpy(), (-log_probs).numpy(), expected.view(-1).tolist(), kept.numpy(), strict=True
        )
        for row, surprise, mean, out in rows:
            ids = _typical_set(surprise, mean, self.mass)
            out[ids] = row[ids]
        return kept


def _typical_set(surprise: np.ndarray, mean: float, mass: float) -> np.ndarray:
    """Ids of the typical set, from a sort of the tokens that are not much more surprising than the mean.

    The set is an interval around the mean. If its border lies inside the tokens looked at, the others are
    outside.
    """
    for reach in (2.0, 4.0, 8.0, 16.0, np.inf):
        most = min(mean + reach, float(np.finfo(np.float32).max))
        ids = np.flatnonzero(surprise <= most)
        near = np.abs(surprise[ids] - np.float32(mean))
        order = np.argsort(near, kind="stable")
        held = np.exp(-surprise[ids[order]]).cumsum(dtype=np.float64)
        last = int(held.searchsorted(mass))
        if last < len(ids) and mean + near[order[last]] < most:
            return ids[near <= near[order[last]]]
    return ids


def _keep_nearest(
    logits: torch.Tensor, log_probs: torch.Tensor, expected: torch.Tensor, mass: float
) -> torch.Tensor:
    """The same by a full sort, without waiting for the device."""
    far = (-log_probs - expected.float()).abs()
    ordered, ids = far.sort(dim=-1)
    held = log_probs.exp().gather(-1, ids).cumsum(dim=-1, dtype=torch.float64)
    last = (held < mass).sum(dim=-1, keepdim=True).clamp_max(logits.shape[-1] - 1)
    return logits.masked_fill(far > ordered.gather(-1, last), -torch.inf)
