"""Weights rounded to 255 even steps per output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.registry import register
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.weights import Dense

from .each_linear import EachLinear, Made, size_of


@register(
    "int8",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class Int8(EachLinear):
    """Rounds the weights of linear layers to integers of 8 bits, with one scale per output.

    The same weights as `load(dtype="int8")` makes, and the form in which a CPU computes fastest. Reads no text.
    """

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        made = Int8Linear.quantize(whole.weight, whole.bias)
        return Made(made, size_of(made))
