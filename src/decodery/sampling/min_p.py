"""Min-p: a floor on the probability, relative to that of the most probable token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_number


@register(
    "min-p",
    paper="Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs (2024)",
    guarantee="lossy; p=0 is the identity",
)
@dataclass(frozen=True)
class MinP(LogitsProcessor):
    """Keeps the tokens at least p times as probable as the most probable one.

    Attributes:
        p: A ratio, 0 to 1.
    """

    p: float = 0.05
    stage = Stage.TRUNCATION

    def __post_init__(self) -> None:
        require_number("min-p", self.p, least=0.0, most=1.0)

    @property
    def neutral(self) -> bool:
        return self.p == 0.0

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        probs = logits.softmax(dim=-1)
        return logits.masked_fill(probs < self.p * probs.amax(dim=-1, keepdim=True), -torch.inf)
