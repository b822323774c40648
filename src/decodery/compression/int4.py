"""Weights rounded to a few even steps per block of 32 inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from decodery.core.registry import register
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.packed import BLOCK
from decodery.models.torch.weights import Dense

from .base import Size
from .each_linear import EachLinear, Made


@register(
    "int4",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class Int4(EachLinear):
    """Rounds the weights of linear layers to 2^bits even steps per block of 32 inputs.

    The steps lie between a block's own bounds. A block has a step and a least value of 16 bits, which is one more bit
    per weight. Reads no text.

    Attributes:
        bits: 4 are the same weights as `load(dtype="int4")` makes; fewer are kept in the same room, and the report says
            what they would need.
    """

    bits: Literal[2, 3, 4] = 4

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        return rounded(whole, self.bits)


def rounded(whole: Dense, bits: int) -> Made:
    """A linear layer in blocks of 2 to 6 bits."""
    kind = Int4Linear if bits <= 4 else BlockLinear
    made = kind.quantize(whole.weight, whole.bias, bits=bits)
    outputs, inputs = made.shape
    size = outputs * inputs * (bits + 32 / BLOCK) / 8 + (0 if made.bias is None else 4 * outputs)
    return Made(made, Size(size, outputs * inputs))
