"""Temperature: how sharply probability concentrates on the likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decodery.core.registry import register

from .logits_processor import Context, LogitsProcessor, Stage, require_number

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: the most probable token, without a division."""


@register(
    "temperature",
    paper="A Learning Algorithm for Boltzmann Machines (1985)",
    guarantee="lossy; t=1 is the identity, t=0 keeps the most probable token",
)
@dataclass(frozen=True)
class Temperature(LogitsProcessor):
    """Divides the logits by t; 0 is greedy decoding.

    Attributes:
        t: 0 or more; below 1e-5 only the most probable token is kept, of equals the lowest id.
    """

    t: float = 1.0
    stage = Stage.TEMPERATURE

    def __post_init__(self) -> None:
        require_number("temperature", self.t, least=0.0)

    @property
    def neutral(self) -> bool:
        return self.t == 1.0

    @property
    def greedy(self) -> bool:
        return self.t < GREEDY_BELOW

    def process(self, logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
        if self.neutral:
            return logits
        if self.greedy:
            best = logits.argmax(dim=-1, keepdim=True)
            return torch.full_like(logits, -torch.inf).scatter_(-1, best, logits.gather(-1, best))
        return logits / self.t
