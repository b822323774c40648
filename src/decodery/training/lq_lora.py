"""LQ-LoRA: the low-rank part learns, beside what has few bits and stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear

from decodery.compression.each_linear import Made
from decodery.compression.lq_lora import LQLoRA, in_bfloat16
from decodery.core.errors import SettingsError
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.torch.weights import Dense

from .kind import Run, kind
from .kind_data import OwnTexts
from .remade import COPY_READY, CopyRecipe, Remaking, TrainedForm, TrainingProgress, copied


@dataclass(frozen=True)
class LowRankRemaking(Remaking):
    """Trains the low-rank part of LQ-LoRA (2023); everything else stays as it was split."""

    split: LQLoRA = field(default_factory=LQLoRA)  # How matrices are split to begin with

    def __post_init__(self) -> None:
        if not self.split.rank:
            raise SettingsError("with a rank of 0 there is nothing to learn: use a rank of 1 or more")

    @property
    def norms(self) -> bool:
        return False

    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        return LowRank(whole, self.split)


class LowRank(TrainedForm):
    """One such layer."""

    def __init__(self, whole: Dense, split: LQLoRA) -> None:
        found = split.decompose(whole.weight.detach())
        # Checkpoints keep what learns as it lies in memory.
        self.found = found._replace(second=found.second.contiguous())
        self._bias, self._split = whole.bias, split

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {"first": self.found.first, "second": self.found.second}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.found.coarse, self._bias) + rows @ self.found.second.T @ self.found.first.T

    def made(self, itemsize: int) -> Made:
        kept = self.found._replace(first=in_bfloat16(self.found.first), second=in_bfloat16(self.found.second))
        return self._split.made(kept, self._bias)


@kind(
    COPY_READY,
    (OwnTexts(400, max_new_tokens=96), CopyRecipe(lr=2e-4), LQLoRA()),
    "--bits 3 --out copy",
    model="to copy",
    file=DESCRIPTION,
    without=("scale_bits", "scale_block", "budget", "fisher"),
)
def _lq_lora(run: Run) -> Mapping[str, Any]:
    """Train the low-rank part of a low-bit copy of MODEL, for -m DIR or --drafter draft-model:model=DIR."""
    return copied(run, LowRankRemaking(run.of(LQLoRA)))
