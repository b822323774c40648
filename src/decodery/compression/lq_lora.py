"""LQ-LoRA: weights as a sum of a few bits each and a product of two thin matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.loaders.store import Progress
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, floating

from .base import LINEARS, Size, Texts
from .budget import cheapest
from .each_linear import EachLinear, Made, Maker
from .fisher import Means, fisher_means

_OFFSET = 0.9677083
"""The quantile at which NormalFloat's largest value stands."""

_OVERSAMPLED = 10
"""Directions that are looked for beside those that are kept."""

_CHOICES = tuple(product((2, 3, 4, 8), (16, 32, 64), (4, 8)))
"""bits, block and scale_bits that a matrix may get under a budget; the paper has 432."""


@register(
    "lq-lora",
    paper="LQ-LoRA: Low-rank Plus Quantized Matrix Decomposition for Efficient Language Model Finetuning (2023)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class LQLoRA(EachLinear):
    """Splits each matrix into a part of a few bits per weight and a low-rank part in 16 bits.

    Both are fitted in turn. The low-rank part is not trained here but by `decodery train lq-lora`. The copy holds the
    sums, in floating point: the report says what the two parts would need, and nothing here becomes faster.

    Attributes:
        bits: Of NormalFloat codes, in blocks of `block` inputs whose scales are rounded to `scale_bits` bits in blocks
            of `scale_block`.
        rank: Of the low-rank part; 0 is NormalFloat alone.
        block: Inputs of a block of codes.
        scale_bits: Bits of a block's scale.
        scale_block: Scales that share a scale of their own.
        steps: Turns at most; they end where the error rises, and the best one counts (the published code keeps the
            last).
        budget: Bits a weight, without the low-rank part, at most in the mean of all matrices, each of which gets its
            own of 24 numbers of bits and sizes of blocks, by an integer program over what is missing after one turn; 0
            for the same in all.
        fisher: Rows and columns count for as much as the loss of the calibration text depends on them, by gradients,
            while a second copy of the model is held; errors are weighed by both means, where the paper has every
            weight's own.
    """

    bits: Literal[2, 3, 4, 8] = 3
    rank: int = 8
    block: int = 32
    scale_bits: Literal[2, 3, 4, 8] = 8
    scale_block: int = 16
    steps: int = 20
    budget: float = 0.0
    fisher: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0 or min(self.block, self.scale_block, self.steps) < 1:
            raise SettingsError("lq-lora needs a rank of 0 or more, and blocks and steps of 1 or more")
        if self.budget and not 2 <= self.budget <= 16:
            raise SettingsError(
                f"lq-lora needs a budget of 2 to 16 bits a weight, not {self.budget:g}, or 0 for `bits` in all matrices"
            )

    @property
    def reads(self) -> bool:
        return self.fisher

    @property
    def whole_numbers(self) -> bool:
        return False

    @property
    def code(self) -> float:
        """Bits of a weight in the coarse part, its share of the scales among them."""
        return self.bits + self.scale_bits / self.block + 16 / (self.block * self.scale_block)

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        return self.made(self.decompose(whole.weight), whole.bias)

    def makers(self, model: Transformer, texts: Texts, progress: Progress) -> Mapping[str, Maker]:
        if not (self.budget or self.fisher):
            return {}
        means: Mapping[str, Means] = fisher_means(model, texts, progress) if self.fisher else {}
        names = [f"layers.{index}.{name}" for index in range(model.config.num_layers) for name in LINEARS]
        splits = dict.fromkeys(names, self)
        if self.budget:
            splits = self._allotted(model, means, progress)
        return {name: partial(_linear, split, means.get(name)) for name, split in splits.items()}

    def _allotted(self, model: Transformer, means: Mapping[str, Means], progress: Progress) -> dict[str, LQLoRA]:
        """Settings of every matrix, with the least sum of squared errors that the budget allows."""
        choices = [
            replace(self, bits=bits, block=block, scale_bits=scale_bits, budget=0.0)  # type: ignore[arg-type]
            for bits, block, scale_bits in _CHOICES
        ]
        prices, sizes, names, weights = [], [], [], 0
        for index, layer in enumerate(model.weights.layers):
            for name in LINEARS:
                names.append(f"layers.{index}.{name}")
                weight = floating(getattr(layer, name)).weight.float()
                own = means.get(names[-1])
                rest = weight - torch.matmul(*_low_rank(weight, min(self.rank, *weight.shape), own))
                size = 1.0 if own is None else own.size
                prices.append([(size * _missing(rest - each.rounded(rest), own)) ** 2 for each in choices])
                sizes.append([round(weight.numel() * each.code) for each in choices])
                weights += weight.numel()
            progress("trying numbers of bits", index + 1, model.config.num_layers)
        levels = cheapest(prices, sizes, int(self.budget * weights))
        return {name: choices[level] for name, level in zip(names, levels, strict=True)}

    def made(self, found: Decomposition, bias: torch.Tensor | None) -> Made:
        """The sum of both parts as a linear layer, and what the parts take."""
        outputs, inputs = found.coarse.shape
        thin = len(found.second) * (outputs + inputs)
        size = Size(outputs * inputs * self.code / 8 + 2 * thin, outputs * inputs + thin)
        return Made(Dense(found.total, bias), size)

    def decompose(self, weight: torch.Tensor, means: Means | None = None) -> Decomposition:
        """Both parts of a matrix [out, in].

        Args:
            means: What its rows and columns count for, all alike if None.
        """
        rank = min(self.rank, *weight.shape)
        best, errors = None, list[float]()
        coarse = torch.zeros_like(weight)
        for _ in range(self.steps if rank else 1):
            first, second = _low_rank(weight - coarse, rank, means)
            coarse = self.rounded(weight - first @ second)
            errors.append(_missing(weight - first @ second - coarse, means))
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
    """A matrix as the sum of a coarse one and a product of low rank.

    Attributes:
        coarse: [out, in] of few bits.
        first: [out, rank].
        second: [rank, in], whose product is the rest.
        errors: Norm of what is missing after every turn, rows and columns weighed by what they count for.
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
    left = torch.linspace(1 - _OFFSET, 0.5, half, dtype=torch.float64, device="cpu")
    right = torch.linspace(0.5, _OFFSET, half + 1, dtype=torch.float64, device="cpu")[1:]
    values = torch.special.ndtri(torch.cat((left, right)))
    return values / torch.special.ndtri(torch.tensor(_OFFSET, dtype=torch.float64, device="cpu"))


def _linear(split: LQLoRA, means: Means | None, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
    """A layer in the form of `split`, which sees what its rows and columns count for."""
    return split.made(split.decompose(whole.weight, means), whole.bias)


def _weighed(matrix: torch.Tensor, means: Means | None) -> torch.Tensor:
    return matrix if means is None else means.rows.to(matrix)[:, None] * matrix * means.columns.to(matrix)


def _missing(matrix: torch.Tensor, means: Means | None) -> float:
    return float(_weighed(matrix, means).double().norm())


def _low_rank(matrix: torch.Tensor, rank: int, means: Means | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest matrix of a rank, as factors [out, rank] and [rank, in] in bfloat16, as they would be kept."""
    if rank == 0:
        return matrix[:, :0], matrix[:0]
    if means is not None:
        first, second = _factors(_weighed(matrix, means), rank)
        return in_bfloat16(first / means.rows.to(first)[:, None]), in_bfloat16(second / means.columns.to(second))
    first, second = _factors(matrix, rank)
    return in_bfloat16(first), in_bfloat16(second)


def _factors(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Random directions to begin with, the same ones every time.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        left, strengths, right = torch.svd_lowrank(matrix, q=min(rank + _OVERSAMPLED, *matrix.shape), niter=4)
    root = strengths[:rank].sqrt()
    return left[:, :rank] * root, (right[:, :rank] * root).T


def in_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest numbers that bfloat16 has, in the same dtype."""
    return numbers.bfloat16().to(numbers.dtype)
