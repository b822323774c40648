"""DES-Vote: the experts with the largest sum of the rows' router weights are shared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import ExpertSharing


@register(
    "des-vote",
    paper="Dynamic Expert Sharing: Decoupling Memory from Parallelism in Mixture-of-Experts Diffusion LLMs (2026)",
    guarantee="exact at beta=1; else rows skip the experts that few other rows choose",
)
@dataclass(frozen=True)
class DESVote(ExpertSharing):
    """Keeps a share beta of all experts, those with the most votes.

    A row's votes are its weights of the experts that it takes. At least as many experts are kept as a row takes; ties
    go to the first one. A pass reads this many experts, whatever its number of rows. The published values of beta are
    0.10 and 0.15 for 256 experts, and 0.4 and 0.6 for 64.

    Attributes:
        beta: The share, above 0 and up to 1.
    """

    beta: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise SettingsError(f"des-vote: beta must be a share of the experts, above 0 and up to 1, not {self.beta}")

    def core(self, said: torch.Tensor, taken: int) -> torch.Tensor:
        weights, chosen = said.topk(taken, dim=-1)
        # Votes are probabilities, so 0 is no vote; a raw score could be below 0.
        votes = torch.zeros_like(said).scatter(1, chosen, weights).sum(dim=0)
        count = max(round(self.beta * len(votes)), taken)
        kept = torch.zeros(len(votes), dtype=torch.bool, device=said.device)
        kept[votes.argsort(descending=True, stable=True)[:count]] = True
        return kept
