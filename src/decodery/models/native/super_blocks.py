"""Linear layers with weights of 4, 5 or 6 bits in super-blocks of 256 inputs and int8 activations, summed in integers.

They hold what GGUF files keep as Q4_K, Q5_K, Q6_K and IQ4_XS without any loss. An integer scale of each block of 32, or
of each half of one, times a half-precision step of the super-block is the step of its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from decodery.core.native.kernels import Form

from . import packed
from .block_linear import TABLE, BlockLinear, stored_numbers
from .floats import MXFP4Linear
from .int4 import Int4Linear
from .int8 import quantize_rows
from .packed import BITS, SUPER, Native

_LEAST_MOST = 16256.0
"""See `least_most` in csrc/state.h."""
_LEAST_STEP = float(np.float32(1) / np.float32(_LEAST_MOST))


@dataclass
class SuperBlockLinear(Native):
    """A linear layer of super-blocks.

    A weight is `step * scale * number - least_step * least` where there are least values (4 and 5 bits), else
    `step * scale * (number - 32)` (6 bits) or `step * scale * TABLE[number]`.

    Attributes:
        form: What kernels call it: SUPER4, SUPER_TABLE4, SUPER5 or SUPER6.
        weight: [out, in * bits / 8] uint8, in the order of `BlockLinear.weight`.
        scales: [out, in / 256, 2] float16 steps and steps of least values; [out, in / 256, 1] without least values.
        integers: [out, in / 32, 2] uint8 scale and least value of a block; without least values int8 scales of its
            halves.
        bias: [out] float32 or None.
    """

    form: Form
    weight: torch.Tensor
    scales: torch.Tensor
    integers: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.scales.shape[0], SUPER * self.scales.shape[1]

    def values(self) -> torch.Tensor:
        """[out, in] float32 what the numbers stand for before any scale, integers from -127 to 113."""
        numbers = stored_numbers(self.weight, self.shape[1], BITS[self.form])
        if self.form == Form.SUPER_TABLE4:
            return torch.tensor(TABLE, dtype=torch.float32, device=numbers.device)[numbers.long()]
        return numbers.float() - (32 if self.form == Form.SUPER6 else 0)

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        outputs, inputs = self.shape
        blocks = SUPER // packed.BLOCK
        step = self.scales[..., :1].float().repeat_interleave(blocks, dim=1)
        halves = self.values().view(outputs, -1, 2, packed.BLOCK // 2)
        if not has_least(self.form):
            return (halves * (step * self.integers.float())[..., None]).view(outputs, inputs)
        least = self.scales[..., 1:].float().repeat_interleave(blocks, dim=1) * self.integers[..., 1:].float()
        return (halves * (step * self.integers[..., :1].float())[..., None] - least[..., None]).view(outputs, inputs)

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        outputs, inputs = self.shape
        parts = 2 if self.form == Form.SUPER6 else 1
        width = packed.BLOCK // parts
        whole, scale = quantize_rows(rows.float())
        whole = whole.view(len(rows), -1, width)
        values = self.values().view(outputs, -1, width)
        scales, integers = self.scales.float(), self.integers.float()
        per_group, per_super = packed.GROUP // width, SUPER // packed.GROUP
        result = torch.zeros(len(rows), outputs, device=rows.device, dtype=torch.float32)
        leasts = None
        if has_least(self.form):
            leasts, least_step = _integer_sums(whole.sum(dim=-1) * scale.repeat_interleave(per_group, dim=-1))
        for number in range(inputs // SUPER):
            total = torch.zeros_like(result)
            for group in range(number * per_super, (number + 1) * per_super):
                of_group = torch.zeros_like(result)
                for part in range(group * per_group, (group + 1) * per_group):
                    # Sums of products stay below 2^24: exact in float32, whatever the order.
                    of_group += (whole[:, part] @ values[:, part].T) * integers[:, part // parts, part % parts]
                total += of_group * scale[:, group, None]
            result += total * scales[:, number, 0]
            if leasts is not None:
                of = integers[:, number * 8 : (number + 1) * 8, 1]
                result -= (leasts[:, number] @ of.T) * least_step[:, number, None] * scales[:, number, 1]
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name. The shapes tell its form: see `super_form`."""
        kept = {"weight": self.weight, "super_scales": self.scales, "integers": self.integers}
        return kept if self.bias is None else kept | {"bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> SuperBlockLinear:
        """The layer that `tensors` came from."""
        weight, scales = tensors["weight"], tensors["super_scales"]
        form = super_form(weight, scales, SUPER * scales.shape[1])
        assert form is not None
        return cls(form, weight, scales, tensors["integers"], tensors.get("bias"))


def has_least(form: Form) -> bool:
    """Whether the blocks of a form have least values."""
    return form in (Form.SUPER4, Form.SUPER5)


def super_form(weight: torch.Tensor, scales: torch.Tensor | None, inputs: int) -> Form | None:
    """The form of super-blocks that tensors of a file are kept in.

    Args:
        weight: [out, inputs * bits / 8] uint8.
        scales: [out, inputs / 256, 2], or 1 without least values.
        inputs: Of the layer.

    Returns:
        None where the shapes are those of no form.
    """
    if scales is None or scales.ndim != 3 or weight.ndim != 2 or inputs % SUPER:
        return None
    sizes = {(inputs * BITS[form] // 8, 1 + has_least(form)): form for form in packed.SUPER_BYTES}
    return sizes.get((weight.shape[1], scales.shape[2]))


BlockKind: TypeAlias = Int4Linear | BlockLinear | SuperBlockLinear | MXFP4Linear
"""A layer whose weights are kept in blocks."""


def _integer_sums(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of blocks as integers of 15 bits: see `quantize_halves` in csrc/gemm.h.

    Args:
        sums: [n, in / 32] scaled sums of the inputs of each block.

    Returns:
        Integers [n, in / 256, 8], and what one of them stands for [n, in / 256].
    """
    sums = sums.view(len(sums), -1, SUPER // packed.BLOCK)
    largest = sums.abs().amax(dim=-1)
    tiny = largest < 1e-30
    # A tensor is divided, as in `quantize_rows`.
    inverse = torch.where(tiny, 0.0, torch.tensor(_LEAST_MOST, dtype=torch.float32, device="cpu") / largest)
    return (sums * inverse[..., None]).round(), torch.where(tiny, 0.0, largest * _LEAST_STEP)


def block_layer(form: Form, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> BlockKind:
    """The layer of a form of blocks.

    Args:
        first, second: See `gguf_blocks.Blocks`.
    """
    if form in packed.SUPER_BYTES:
        return SuperBlockLinear(form, weight, first, second)
    if form == Form.BLOCKS4:
        return Int4Linear(weight, first, second)
    if form == Form.MXFP4:
        return MXFP4Linear(weight, first)
    return BlockLinear(weight, first[..., None] if form == Form.BLOCKS8 else torch.stack((first, second), dim=-1))
