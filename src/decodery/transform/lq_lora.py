"""LQ-LoRA: weights as a sum of a few bits each and a product of two thin matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..errors import SettingsError
from ..model.weights import Dense
from ..registry import register
from .base import Size
from .each_linear import EachLinear, Made

_OFFSET = 0.9677083
"""The quantile at which NormalFloat's largest value stands."""

_OVERSAMPLED = 10
"""Directions that are looked for beside those that are kept."""


@register(
    "lq-lora",
    paper="LQ-LoRA: Low-rank Plus Quantized Matrix Decomposition for Efficient Language Model Finetuning (2023)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class LQLoRA(EachLinear):
    """Splits each matrix into one of a few bits per weight and a low-rank one in 16 bits, by turns, and adds them up.

    bits: of NormalFloat codes, in blocks of `block` inputs whose scales are rounded to `scale_bits` bits in blocks of
    `scale_block`. rank: of the low-rank part; 0 is NormalFloat alone. steps: turns at most; they end where the error
    rises, and the best one counts (the published code keeps the last). No Fisher weights, no training of the low-rank
    part, one configuration for all matrices. The copy holds the sums, in floating point: the report says what the two
    parts would need, and nothing here becomes faster.
    """

    bits: Literal[2, 3, 4, 8] = 3
    rank: int = 8
    block: int = 32
    scale_bits: Literal[2, 3, 4, 8] = 8
    scale_block: int = 16
    steps: int = 20

    def __post_init__(self) -> None:
        if self.rank < 0 or min(self.block, self.scale_block, self.steps) < 1:
            raise SettingsError("lq-lora needs a rank of 0 or more, and blocks and steps of 1 or more")

    @property
    def whole_numbers(self) -> bool:
        return False

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        return self.made(self.decompose(whole.weight), whole.bias)

    def made(self, found: Decomposition, bias: torch.Tensor | None) -> Made:
        """The sum of both parts as a linear layer, and what the parts take."""
        outputs, inputs = found.coarse.shape
        code = self.bits + self.scale_bits / self.block + 16 / (self.block * self.scale_block)
        thin = len(found.second) * (outputs + inputs)
        size = Size(outputs * inputs * code / 8 + 2 * thin, outputs * inputs + thin)
        return Made(Dense(found.total, bias), size)

    def decompose(self, weight: torch.Tensor) -> Decomposition:
        """Both parts of a matrix [out, in]."""
        rank = min(self.rank, *weight.shape)
        best, errors = None, list[float]()
        coarse = torch.zeros_like(weight)
        for _ in range(self.steps if rank else 1):
            first, second = _low_rank(weight - coarse, rank)
            coarse = self.rounded(weight - first @ second)
            errors.append(float((weight - first @ second - coarse).double().norm()))
            if best is not None and errors[-1] >= errors[-2]:
                break
            best = coarse, first, second
        assert best is not None
        return Decomposition(*best, errors)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest NormalFloat numbers of a matrix [out, in], whose rows are cut into blocks."""
        levels = normal_float(self.bits).to(weight)
        short = -weight.shape[1] % self.block
        blocks = torch.nn.functional.pad(weight, (0, short)).view(weight.shape[0], -1, self.block)
        scales = self._scales(blocks.abs().amax(dim=-1))[..., None]
        middles = (levels[1:] + levels[:-1]) / 2
        values = levels[torch.bucketize(blocks / scales.clamp(min=1e-30), middles)] * scales
        return values.view(weight.shape[0], -1)[:, : weight.shape[1]]

    def _scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales less the least of all, rounded to a few bits in blocks whose own scale is bfloat16."""
        least, shape = scales.min(), scales.shape
        flat = (scales - least).flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % self.scale_block)).view(-1, self.scale_block)
        most = 2**self.scale_bits - 1
        step = (blocks.amax(dim=-1, keepdim=True) / most).bfloat16().to(scales.dtype)
        numbers = (blocks / step.clamp(min=1e-30)).round().clamp(0, most)
        return (numbers * step).flatten()[: len(flat)].view(shape) + least


class Decomposition(NamedTuple):
    """coarse: [out, in] of few bits. first: [out, rank], second: [rank, in], whose product is the rest.

    errors: norm of what is missing after every turn.
    """

    coarse: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    errors: list[float]

    @property
    def total(self) -> torch.Tensor:
        """[out, in] what takes the matrix's place."""
        return self.coarse + self.first @ self.second


def normal_float(bits: int) -> torch.Tensor:
    """[2^bits] float64, ascending from -1 to 1: quantiles of the normal distribution."""
    half = 2 ** (bits - 1)
    left = torch.linspace(1 - _OFFSET, 0.5, half, dtype=torch.float64)
    right = torch.linspace(0.5, _OFFSET, half + 1, dtype=torch.float64)[1:]
    values = torch.special.ndtri(torch.cat((left, right)))
    return values / torch.special.ndtri(torch.tensor(_OFFSET, dtype=torch.float64))


def _low_rank(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest matrix of a rank, as factors [out, rank] and [rank, in] in bfloat16, as they would be kept."""
    if rank == 0:
        return matrix[:, :0], matrix[:0]
    # Random directions to begin with, the same ones every time.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        left, strengths, right = torch.svd_lowrank(matrix, q=min(rank + _OVERSAMPLED, *matrix.shape), niter=4)
    root = strengths[:rank].sqrt()
    return in_bfloat16(left[:, :rank] * root), in_bfloat16((right[:, :rank] * root).T)


def in_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest numbers that bfloat16 has, in the same dtype."""
    return numbers.bfloat16().to(numbers.dtype)
