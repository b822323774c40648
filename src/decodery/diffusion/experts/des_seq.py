"""DES-Seq: the experts that some row ranks first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register

from .base import ExpertSharing


@register(
    "des-seq",
    paper="Dynamic Expert Sharing: Decoupling Memory from Parallelism in Mixture-of-Experts Diffusion LLMs (2026)",
    guarantee="exact where `each` is the number that a row takes; else rows skip experts that no row ranks so high",
)
@dataclass(frozen=True)
class DESSeq(ExpertSharing):
    """Keeps the `each` most likely experts of every row, and lets every row choose among all of them.

    A row takes as many experts as the model defines, including those kept for other rows: they are read anyway.

    Attributes:
        each: Experts kept for each row.
    """

    each: int = 3

    def __post_init__(self) -> None:
        if self.each < 1:
            raise SettingsError(f"des-seq: each must be at least 1 expert per row, not {self.each}")

    def core(self, said: torch.Tensor, taken: int) -> torch.Tensor:
        kept = torch.zeros(said.shape[1], dtype=torch.bool, device=said.device)
        kept[said.topk(min(self.each, taken), dim=-1).indices] = True
        if kept.sum() < taken:
            # Where rows agree, fewer experts are kept than a row takes: those with the next largest sums are added.
            kept[said.sum(dim=0).masked_fill(kept, -1).topk(taken - int(kept.sum())).indices] = True
        return kept
