"""Epsilon sampling: a fixed floor on the probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_number


@register(
    "epsilon",
    paper="Truncation Sampling as Language Model Desmoothing (2022)",
    guarantee="lossy; cutoff=0 is the identity",
)
@dataclass(frozen=True)
class Epsilon(LogitsProcessor):
    """Keeps the tokens with a probability of at least the cutoff, and always the most probable one.

    Attributes:
        cutoff: A probability, 0 to 1; usually 3e-4 to 9e-4.
    """

    cutoff: float = 3e-4
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("epsilon", self.cutoff, least=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.cutoff == 0.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        probs = logits.softmax(dim=-1)
        floor = probs.amax(dim=-1, keepdim=True).clamp_max(self.cutoff)
        return logits.masked_fill(probs < floor, -torch.inf)
