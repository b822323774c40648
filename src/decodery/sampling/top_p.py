"""Top-p, or nucleus sampling: the fewest tokens that hold a given share of the probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_number
from .masks import keep
from .prefix import smallest_prefix


@register(
    "top-p",
    paper="The Curious Case of Neural Text Degeneration (2019)",
    guarantee="lossy; p=1 is the identity",
)
@dataclass(frozen=True)
class TopP(LogitsProcessor):
    """Keeps the fewest most probable tokens with a mass of at least p; the token that crosses p is kept.

    Of equal tokens at the border, the lowest ids are kept.

    Attributes:
        p: A share above 0, up to 1.
    """

    p: float = 0.9
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("top-p", self.p, above=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.p == 1.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        if logits.device.type != "cpu":
            return keep_prefix(logits, self.p)
        probs = logits.softmax(dim=-1)
        return keep(logits, (_nucleus(*row, self.p) for row in zip(logits.numpy(), probs.numpy(), strict=True)))


def _nucleus(row: np.ndarray, probs: np.ndarray, p: float) -> np.ndarray:
    """Ids of the nucleus, found among the likely tokens.

    All tokens below a probability c hold less than V c together, so those from (1 - p) / V up are always enough
    but for rounding; often those from a much higher one are.
    """
    for least in (1e-3, (1.0 - p) / len(row), 0.0):
        ids = np.flatnonzero(probs >= least)
        if probs[ids].sum(dtype=np.float64) >= p:
            break
    values = row[ids]
    negated, needed = smallest_prefix(-values, probs[ids], p)
    equal = ids[values == -negated]
    return np.concatenate([ids[values > -negated], equal[:needed]])


def keep_prefix(logits: torch.Tensor, p: float | torch.Tensor) -> torch.Tensor:
    """The nucleus of each row by a full sort, without waiting for the device.

    Args:
        logits: [n, V].
        p: One for all rows, or float64 [n, 1].
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    mass = logits.softmax(dim=-1).gather(-1, ids).cumsum(dim=-1, dtype=torch.float64)
    ordered[:, 1:].masked_fill_(mass[:, :-1] >= p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)
