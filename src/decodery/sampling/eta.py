"""Eta sampling: a floor on the probability that is lower where the entropy is high."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .entropy import entropy
from .logits_processor import Context, LogitsProcessor, Stage, require_number


@register(
    "eta",
    paper="Truncation Sampling as Language Model Desmoothing (2022)",
    guarantee="lossy; cutoff=0 is the identity",
)
@dataclass(frozen=True)
class Eta(LogitsProcessor):
    """Keeps the tokens at least min(cutoff, sqrt(cutoff) exp(-entropy)) probable, and always the top one.

    The entropy is in nats.

    Attributes:
        cutoff: A probability, 0 to 1; usually 3e-4 to 2e-3.
    """

    cutoff: float = 3e-4
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("eta", self.cutoff, least=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.cutoff == 0.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        log_probs = logits.log_softmax(dim=-1)
        floor = (-entropy(log_probs)).exp().mul_(math.sqrt(self.cutoff)).clamp_max(self.cutoff).float()
        probs = log_probs.exp()
        floor = torch.minimum(floor, probs.amax(dim=-1, keepdim=True))
        return logits.masked_fill(probs < floor, -torch.inf)
