"""N:M sparsity that comes in by and by: progressive gradient flow, and what it is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import linear

from decodery.compression.each_linear import Made
from decodery.compression.nm_sparsity import sparse, strongest
from decodery.core.errors import SettingsError
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.torch.weights import Dense

from .kind import Run, kind, option
from .kind_data import OwnTexts
from .remade import COPY_READY, CopyRecipe, Remaking, TrainedForm, TrainingProgress, WholeForm, copied

Schedule = Literal["linear", "exponential", "structure", "sr-ste"]

_DECAY = 2e-4
"""What SR-STE adds to the gradient of a weight that is left out, times that weight."""
_FAINT = 5.0
"""How many factors of e the exponential decay goes through before it ends."""


@dataclass(frozen=True)
class SparseRemaking(Remaking):
    """Progressive Gradient Flow for Robust N:M Sparsity Training in Transformers (2024).

    The n strongest of every m consecutive weights are found anew in every step.

    Attributes:
        schedule: Schedule that removes the other weights. linear, exponential: their factor falls to 0. structure: of
            each m first m - 1 stay, then m/2, m/4, ... sr-ste: they are 0 from the first step on, with gradients
            (Learning N:M Fine-grained Structured Sparse Neural Networks, 2021).
        straight: Pass gradients to removed weights unchanged (straight-through), as in the published code.
    """

    n: int = option(2, "Weights to keep.")
    m: int = option(4, "Size of a group of consecutive weights.")
    schedule: Schedule = "linear"
    dense: float = option(0.1, "Share of the steps at the beginning in which all weights count.")
    decay: float = option(0.75, "Share of the steps after that in which the others are removed.")
    straight: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n < self.m <= 64:
            raise SettingsError(f"n of m weights stay with 1 <= n < m <= 64, not {self.n} of {self.m}")
        if self.dense < 0 or self.decay < 0 or self.dense + self.decay >= 1.0:
            raise SettingsError("dense and decay are shares of the steps that leave some of them: together below 1")
        if self.schedule == "structure" and (self.m % self.n or (self.m // self.n).bit_count() > 1):
            raise SettingsError(f"structure halves what stays until it is n: {self.m} is not n times a power of 2")

    def left(self, done: float) -> float:
        """What weights that are left out are multiplied by, once a share `done` of the steps is over."""
        if self.schedule in ("structure", "sr-ste"):
            return 0.0 if self.schedule == "sr-ste" or done >= self.dense else 1.0
        if done < self.dense:
            return 1.0
        along = (done - self.dense) / self.decay if self.decay else 1.0
        if along >= 1.0:
            return 0.0
        return 1.0 - along if self.schedule == "linear" else math.exp(-_FAINT * along)

    def kept(self, done: float) -> int:
        """How many of every m stay by then."""
        if self.schedule != "structure" or done >= self.dense + self.decay:
            return self.n
        counts = [self.m - 1]
        while counts[-1] > self.n:
            counts.append(self.m >> len(counts))
        along = max(0.0, done - self.dense) / self.decay
        return max(self.n, counts[min(int(along * len(counts)), len(counts) - 1)])

    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        return Sparse(whole, self, progress_made)


class Sparse(WholeForm):
    """One such layer, whose weights are all kept until the end."""

    def __init__(self, whole: Dense, remaking: SparseRemaking, progress_made: TrainingProgress) -> None:
        super().__init__(whole, progress_made)
        self._remaking = remaking

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        remaking, done = self._remaking, self.progress_made.done
        weight = self.whole.weight
        others = ~strongest(weight.detach().abs(), remaking.kept(done), remaking.m)
        factor = torch.where(others, remaking.left(done), 1.0).to(weight.dtype)
        if remaking.schedule == "sr-ste":
            weight = _Decaying.apply(weight, others)
        through = remaking.straight or remaking.schedule == "sr-ste"
        seen = weight + (weight * factor - weight).detach() if through else weight * factor
        return linear(rows, seen, self.whole.bias)

    def made(self, itemsize: int) -> Made:
        n, m = self._remaking.n, self._remaking.m
        whole = Dense(self.whole.weight.detach(), self.whole.bias)
        return sparse(whole, strongest(whole.weight.abs(), n, m), n, m, itemsize)


class _Decaying(torch.autograd.Function):
    """Weights as they are, whose gradient pulls some of them towards 0."""

    @staticmethod
    def forward(ctx, weight, others):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight, others)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        weight, others = ctx.saved_tensors
        return gradient + _DECAY * weight * others, None


@kind(
    COPY_READY,
    (OwnTexts(400, max_new_tokens=96), CopyRecipe(), SparseRemaking()),
    "--n 2 --m 4 --out sparse",
    model="to copy",
    file=DESCRIPTION,
)
def _nm_sparsity(run: Run) -> Mapping[str, Any]:
    """Train a copy of MODEL with at most N weights of every M, for -m DIR or --drafter draft-model:model=DIR.

    The method is progressive gradient flow: weights are removed step by step.
    """
    return copied(run, run.of(SparseRemaking))
