"""BitNet b1.58: weights of -1, 0 and 1 times one scale per matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from decodery.core.registry import register
from decodery.models.native.ternary import TernaryLinear
from decodery.models.torch.weights import Dense

from .base import Size
from .each_linear import EachLinear, Made

Measure = Literal["median", "mean"]

_EPS = 1e-5
_TRITS_PER_BYTE = 5
"""3^5 = 243 of a byte's 256 values."""


@register(
    "bitnet",
    paper="BitNet b1.58 Reloaded: State-of-the-art Performance Also on Smaller Networks (2024)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class BitNet(EachLinear):
    """Rounds the weights of linear layers to -1, 0 and 1 times one scale per matrix, untrained.

    Matrices that are kept as one (queries, keys and values; gate and up) have one scale. Activations are integers of 8
    bits, as in every quantized layer here, with a scale per row and 64 inputs where the paper has one per row. Little
    is left of a model that was not trained for it: `decodery train bitnet` trains one. The report counts five weights
    to a byte, of which kernels read four. Reads no text.

    Attributes:
        measure: What the scale is, the "median" of the weights' magnitudes or their "mean", as in the original b1.58.
    """

    measure: Measure = "median"

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        return ternary(whole, self.measure)


def ternary(whole: Dense, measure: Measure) -> Made:
    """A ternary linear layer."""
    outputs, inputs = whole.shape
    trits, scale = three(whole.weight, measure)
    bias = None if whole.bias is None else whole.bias.detach().float()
    made = TernaryLinear.of(trits, scale.float().repeat(outputs), bias)
    size = -(-outputs * inputs // _TRITS_PER_BYTE) + 2 + (0 if bias is None else 4 * outputs)
    return Made(made, Size(size, outputs * inputs))


def three(weight: torch.Tensor, measure: Measure) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] ternary weights of the same dtype, and their one scale [].

    Half precision holds the scale. No gradients go through either. Of an even number of weights the median is the lower
    of the two in the middle.
    """
    magnitudes = weight.detach().abs()
    scale = magnitudes.median() if measure == "median" else magnitudes.mean()
    scale = scale.clamp(min=_EPS).half().to(weight.dtype)
    return (weight.detach() / scale).round().clamp(-1, 1), scale
