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


def keep_prefix(logits: torch.Tensor, p: float | torch.Tensor, most: int | None = None) -> torch.Tensor:
    """The nucleus of each row by a sort, without waiting for the device.

    Args:
        logits: [n, V].
        p: One for all rows, or float64 [n, 1].
        most: So many logits of a row are sorted; of the others, all are -inf or equal to the least of these. None sorts
            all.
    """
    ordered, ids = logits.sort(dim=-1, descending=True) if most is None else logits.topk(min(most, logits.shape[1]))
    probs = logits.softmax(dim=-1)
    mass = probs.gather(-1, ids).cumsum(dim=-1, dtype=torch.float64)
    last = (mass[:, :-1] < p).sum(dim=-1, keepdim=True)
    border, share = ordered.gather(-1, last), probs.gather(-1, ids.gather(-1, last)).double()
    above = (ordered > border).sum(dim=-1, keepdim=True)
    before = mass.gather(-1, (above - 1).clamp(min=0)).where(above > 0, 0.0)
    # Among equals at the border a token is kept where those with lower ids leave something of the share.
    equal = logits == border
    kept = (logits > border) | (equal & (before + (equal.cumsum(dim=-1) - 1) * share < p))
    return logits.masked_fill(~kept, -torch.inf)
