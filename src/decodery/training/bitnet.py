"""BitNet b1.58: ternary layers that learn, from a dense model to begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from decodery.compression.bitnet import Measure, ternary, three
from decodery.compression.each_linear import Made
from decodery.core.errors import SettingsError
from decodery.models.loaders.drafts import DESCRIPTION
from decodery.models.native.int8 import quantize_rows
from decodery.models.torch.weights import Dense

from .kind import Run, kind, option
from .kind_data import OwnTexts
from .remade import COPY_READY, CopyRecipe, Remaking, TrainedForm, TrainingProgress, WholeForm, copied


@dataclass(frozen=True)
class TernaryRemaking(Remaking):
    """Ternary weights and 8-bit activations with gradients (BitNet b1.58 Reloaded, 2024).

    The paper's norm inside of each layer is left out: without rounding, the copy begins as the model itself.
    """

    measure: Measure = option("median", "Scale of a matrix: the median or mean of its magnitudes.")
    ramp: float = option(0.3, "Share of the steps in which rounding increases. 0: all of it at once.")

    def __post_init__(self) -> None:
        if not 0.0 <= self.ramp <= 1.0:
            raise SettingsError(f"rounding comes in over a share of the steps from 0 to 1, not {self.ramp}")

    @property
    def whole_numbers(self) -> bool:
        return True

    def form(self, name: str, whole: Dense, progress_made: TrainingProgress) -> TrainedForm:
        return Ternary(whole, self, progress_made)


class Ternary(WholeForm):
    """One such layer. Its weights are those in floating point whose rounding is what the copy keeps."""

    def __init__(self, whole: Dense, remaking: TernaryRemaking, progress_made: TrainingProgress) -> None:
        super().__init__(whole, progress_made)
        self._remaking = remaking

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        done, ramp = self.progress_made.done, self._remaking.ramp
        share = min(1.0, done / ramp) if ramp else 1.0
        trits, scale = three(self.whole.weight, self._remaking.measure)
        weight = _towards(self.whole.weight, trits * scale, share)
        return linear(_towards(rows, rounded(rows), share), weight, self.whole.bias)

    def made(self, itemsize: int) -> Made:
        return ternary(self.whole, self._remaking.measure)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """[N, in] activations as layers of integers see them."""
    whole, scale = quantize_rows(rows.detach().float())
    return (whole * scale[..., None]).flatten(1)[:, : rows.shape[1]].to(rows.dtype)


def _towards(values: torch.Tensor, coarse: torch.Tensor, share: float) -> torch.Tensor:
    """Values on their way to what they are rounded to, with the gradient of neither."""
    return values + share * (coarse - values).detach()


@kind(
    COPY_READY,
    (OwnTexts(400, max_new_tokens=96), CopyRecipe(lr=1e-3), TernaryRemaking()),
    "--out ternary --steps 300",
    model="to copy",
    file=DESCRIPTION,
)
def _bitnet(run: Run) -> Mapping[str, Any]:
    """Train a copy of MODEL with weights of -1, 0 and 1, for -m DIR or --drafter draft-model:model=DIR.

    The method is BitNet b1.58, starting from MODEL.
    """
    return copied(run, run.of(TernaryRemaking))
