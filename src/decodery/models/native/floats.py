"""Linear layers whose weights are small floating point numbers: E2M1 (MXFP4, NVFP4), E4M3 (FP8) and NF4.

E2M1 is summed in integers with int8 activations, as blocks are: twice such a number is an integer. The others are
multiplied with the rows as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from decodery.core.native.kernels import Form

from . import packed
from .int8 import quantize_rows
from .packed import CODE_GROUP, FLOAT_GROUP, Native

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what the codes of E2M1 stand for."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What the codes of NF4 stand for: quantiles of a normal distribution."""
_HALF = packed.BLOCK // 2


@dataclass
class Float4Linear(Native):
    """A linear layer of E2M1 weights: `scale * step * number`, with a step for 16 inputs.

    Attributes:
        weight: [out, in / 2] uint8 codes, the even input in the low half.
        half_steps: [out, in / 16] float16, half of what a number of 1 stands for before the scale.
        scale: [out] float32.
        bias: [out] float32 or None.
    """

    weight: torch.Tensor
    half_steps: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.FLOAT4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], 2 * self.weight.shape[1]

    @property
    def scales(self) -> torch.Tensor:
        """[out, in / 32, 2] float16 steps of both halves of a block."""
        return self.half_steps.view(len(self.half_steps), -1, 2)

    def values(self) -> torch.Tensor:
        """[out, in] float32 twice the numbers, integers from -12 to 12."""
        return _twice(self.weight)

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        outputs, inputs = self.shape
        halves = self.values().view(outputs, -1, _HALF) * self.half_steps.float()[..., None]
        return halves.view(outputs, inputs) * self.scale[:, None]

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        outputs, inputs = self.shape
        whole, scale = quantize_rows(rows.float())
        whole, values = whole.view(len(rows), -1, _HALF), self.values().view(outputs, -1, _HALF)
        result = torch.zeros(len(rows), outputs, device=rows.device, dtype=torch.float32)
        for number in range(inputs // _HALF):
            # Sums of 16 products stay below 2^24: exact in float32, whatever the order.
            sums = whole[:, number] @ values[:, number].T
            result += sums * self.half_steps[:, number].float() * scale[:, number * _HALF // packed.GROUP, None]
        result *= self.scale
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "half_steps": self.half_steps, "scale": self.scale}
        return kept if self.bias is None else kept | {"bias": self.bias}


@dataclass
class MXFP4Linear(Native):
    """A linear layer of E2M1 weights, 32 of which share a power of two, as in microscaling formats.

    Attributes:
        weight: [out, in / 2] uint8 codes, the even input in the low half.
        exponents: [out, in / 32] uint8, a number of 1 stands for 2^(exponent - 127), and nothing for a number where
            that is 255.
        bias: [out] float32 or None.
    """

    weight: torch.Tensor
    exponents: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.MXFP4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], 2 * self.weight.shape[1]

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        blocks = _twice(self.weight).view(*self.exponents.shape, packed.BLOCK) / 2
        return (blocks * powers(self.exponents)[..., None]).view(self.shape)

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        whole, scale = quantize_rows(rows.float())
        whole, steps = whole.view(len(rows), -1, packed.BLOCK), powers(self.exponents)
        values = _twice(self.weight).view(len(self.weight), -1, packed.BLOCK)
        result = torch.zeros(len(rows), len(self.weight), device=rows.device, dtype=torch.float32)
        for number in range(steps.shape[1]):
            # Sums of 32 products stay below 2^24: exact in float32, whatever the order.
            sums = whole[:, number] @ values[:, number].T
            result += sums * steps[:, number] * scale[:, number * packed.BLOCK // packed.GROUP, None]
        result /= 2
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "exponents": self.exponents}
        return kept if self.bias is None else kept | {"bias": self.bias}


@dataclass
class Float8Linear(Native):
    """A linear layer of E4M3 weights, with a scale for 128 inputs of an output.

    Attributes:
        weight: [out, in] uint8, the bytes of float8_e4m3fn.
        group_scales: [out, in / 128, rounded up] float32.
        bias: [out] float32 or None.
    """

    weight: torch.Tensor
    group_scales: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.FLOAT8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], self.weight.shape[1]

    def values(self) -> torch.Tensor:
        """[out, in] float32 the numbers before scales."""
        return self.weight.view(torch.float8_e4m3fn).float()

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        groups = torch.arange(self.shape[1], device=self.weight.device) // FLOAT_GROUP
        return self.values() * self.group_scales[:, groups]

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        result = _by_inputs(rows.float(), self.values(), self.group_scales, FLOAT_GROUP)
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "group_scales": self.group_scales}
        return kept if self.bias is None else kept | {"bias": self.bias}


@dataclass
class NF4Linear(Native):
    """A linear layer of NF4 weights (QLoRA, 2023), with a scale for 64 inputs of an output.

    Attributes:
        weight: [out, in / 2] uint8 places in `NF4`, the even input in the low half.
        code_scales: [out, in / 64, rounded up] float32.
        bias: [out] float32 or None.
    """

    weight: torch.Tensor
    code_scales: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.CODES4
    table: ClassVar[np.ndarray] = np.array(NF4, np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], 2 * self.weight.shape[1]

    def values(self) -> torch.Tensor:
        """[out, in] float32 the numbers before scales."""
        codes = torch.stack((self.weight & 15, self.weight >> 4), dim=-1).view(self.shape)
        return torch.tensor(NF4, dtype=torch.float32, device=codes.device)[codes.long()]

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        groups = torch.arange(self.shape[1], device=self.weight.device) // CODE_GROUP
        return self.values() * self.code_scales[:, groups]

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        result = _by_inputs(rows.float(), self.values(), self.code_scales, CODE_GROUP)
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "code_scales": self.code_scales}
        return kept if self.bias is None else kept | {"bias": self.bias}


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) float32, NaN for 255; exponents are bytes, or the numbers they encode."""
    whole = exponents.view(torch.uint8).int()
    bits = whole << 23
    # The least is no normal number.
    bits[whole == 0], bits[whole == 255] = 1 << 22, 0x7FC00000
    return bits.view(torch.float32)


def _twice(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] float32 twice what the codes of E2M1 [out, in / 2] stand for, integers from -12 to 12."""
    codes = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)
    return torch.tensor(TWICE, dtype=torch.float32, device=codes.device)[codes.long()]


def _by_inputs(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """Rows [N, in] times weights [out, in], input by input and group by group, which have scales [out, groups]."""
    result = torch.zeros(len(rows), len(weight), device=rows.device, dtype=torch.float32)
    for group, first in enumerate(range(0, weight.shape[1], width)):
        sums = torch.zeros_like(result)
        for each in range(first, min(first + width, weight.shape[1])):
            sums += weight[:, each] * rows[:, each, None]
        result += sums * scales[:, group]
    return result
