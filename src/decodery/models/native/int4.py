"""Linear layers with 4-bit weights in blocks of 32 and int8 activations, summed in integers.

A weight is `step * value + least` with value in [0, 15] and half-precision step and least, as in the Q4_1 blocks of
GGUF files, whose weights this form holds without further loss. It reads fewer bytes than int8, so a pass over few rows
is faster; its arithmetic per block makes a pass over many rows slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import Form

from . import packed
from .int8 import quantize_rows
from .packed import Native

_BLOCKS = 1 << 16
"""Blocks whose steps are looked for at a time."""
_CUTS = (0.0, 0.04, 0.08, 0.12, 0.16)
"""What is tried to leave out of a block's range, at both ends together: a few large weights make all steps coarse."""


@dataclass
class Int4Linear(Native):
    """A linear layer of 4-bit weights.

    Attributes:
        weight: [out, in / 2] uint8, the even input in the low half.
        step, least: [out, in / 32] float16.
        bias: [out].
    """

    weight: torch.Tensor
    step: torch.Tensor
    least: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.BLOCKS4

    @classmethod
    def quantize(cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int = 4) -> Int4Linear:
        """Quantize [out, in] floating point weights to 16 even steps per block, with least squared error.

        Large weights count for more, as they do in what comes out. `in` must be a multiple of 32.

        Args:
            bits: Fewer of them leave fewer steps, 2^bits, in the same room.
        """
        outputs, inputs = weight.shape
        if inputs % packed.BLOCK:
            raise UnsupportedModel(
                f"int4 needs layers whose inputs come in blocks of {packed.BLOCK}, not {inputs}: use int8"
            )
        values, step, least = even_steps(weight, bits)
        pairs = values.view(outputs, inputs // 2, 2)
        scales = step.view(outputs, -1), least.view(outputs, -1)
        return cls(pairs[..., 0] | pairs[..., 1] << 4, *scales, None if bias is None else bias.detach().float())

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], 2 * self.weight.shape[1]

    @property
    def scales(self) -> torch.Tensor:
        """[out, in / 32, 2] float16 step and least."""
        return torch.stack((self.step, self.least), dim=-1)

    def values(self) -> torch.Tensor:
        """[out, in] float32 integers in [0, 15]."""
        return torch.stack((self.weight & 15, self.weight >> 4), dim=-1).view(self.shape).float()

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        blocks = self.values().view(self.shape[0], -1, packed.BLOCK)
        return (blocks * self.step.float()[..., None] + self.least.float()[..., None]).view(self.shape)

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        outputs, inputs = self.shape
        whole, scale = quantize_rows(rows.float())
        whole = whole.view(len(rows), -1, packed.BLOCK)
        values = self.values().view(outputs, -1, packed.BLOCK)
        result = torch.zeros(len(rows), outputs, device=rows.device, dtype=torch.float32)
        for block in range(inputs // packed.BLOCK):
            of_group = scale[:, block // 2, None]
            sums = whole[:, block] @ values[:, block].T
            result += sums * self.step[:, block].float() * of_group
            result += self.least[:, block].float() * (of_group * whole[:, block].sum(dim=-1, keepdim=True))
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "step": self.step, "least": self.least}
        return kept if self.bias is None else kept | {"bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Int4Linear:
        """The layer that `tensors` came from."""
        return cls(tensors["weight"], tensors["step"], tensors["least"], tensors.get("bias"))


def even_steps(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """2^bits even steps per block of 32 inputs, of those tried the ones with least weighted squared error.

    Args:
        weight: [out, in] in floating point; `in` a multiple of 32.
        bits: of a number, at most 8.

    Returns:
        Numbers [out * in / 32, 32] uint8, steps and least values [out * in / 32] float16.
    """
    most = 2**bits - 1
    found = [_steps(some, most) for some in weight.detach().view(-1, packed.BLOCK).split(_BLOCKS)]
    values, step, least = (torch.cat(each) for each in zip(*found, strict=True))
    return values, step, least


def _steps(blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, 32] -> integers [n, 32] uint8 in [0, most], step and least [n] float16."""
    blocks = blocks.float()
    first, last = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    weight = blocks.abs() + blocks.square().mean(dim=-1, keepdim=True).sqrt()
    step, least = _half((last - first) / most), _half(first)
    # Weights that were cut like this before come through without further loss.
    numbers = _numbers(blocks, step, least, most)
    error = _error(blocks, weight, numbers, step, least)
    for cut in _CUTS:
        spread = (last - first) * (1 - cut)
        tried = _fitted(blocks, weight, _numbers(blocks, spread / most, (first + last - spread) / 2, most), most)
        other = _error(blocks, weight, *tried)
        better = other < error
        error = torch.where(better, other, error)
        numbers, step, least = (
            torch.where(better, new, old) for new, old in zip(tried, (numbers, step, least), strict=True)
        )
    return numbers.to(torch.uint8), step[:, 0].half(), least[:, 0].half()


def _half(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to half precision."""
    return numbers.half().float()


def _error(
    blocks: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, step: torch.Tensor, least: torch.Tensor
) -> torch.Tensor:
    """[n, 1] weighted sum of squared differences."""
    return (weight * (numbers * step + least - blocks).square()).sum(dim=-1, keepdim=True)


def _numbers(blocks: torch.Tensor, step: torch.Tensor, least: torch.Tensor, most: int) -> torch.Tensor:
    """The nearest of the steps, 0 to `most`, for each weight."""
    inverse = torch.where(step != 0, 1.0 / step, 0.0)
    return ((blocks - least) * inverse).round_().clamp_(0, most)


def _fitted(
    blocks: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step and least that fit these numbers best, as half-precision numbers, and the numbers nearest to those."""
    total, n = weight.sum(dim=-1, keepdim=True), (weight * numbers).sum(dim=-1, keepdim=True)
    x, nn = (weight * blocks).sum(dim=-1, keepdim=True), (weight * numbers.square()).sum(dim=-1, keepdim=True)
    nx = (weight * numbers * blocks).sum(dim=-1, keepdim=True)
    spread = total * nn - n * n
    step = _half(torch.where(spread > 0, (total * nx - n * x) / spread, 0.0))
    least = _half(torch.where(total > 0, (x - step * n) / total, 0.0))
    return _numbers(blocks, step, least, most), step, least
