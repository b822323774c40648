"""Linear layers with 4-bit weights in blocks of 32 and int8 activations, summed in integers.

A weight is `step * value + least` with value in [0, 15] and half-precision step and least, as in the Q4_1 blocks of
GGUF files, whose weights this form holds without further loss. It reads fewer bytes than int8, so a pass over few rows
is faster; its arithmetic per block makes a pass over many rows slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ..errors import UnsupportedModel
from . import kernels, packed
from .int8 import quantize_rows

if TYPE_CHECKING:
    from .packed import Packed


@dataclass
class Int4Linear:
    """weight: [out, in / 2] uint8, the even input in the low half; step, least: [out, in / 32] float16; bias: [out]."""

    weight: torch.Tensor
    step: torch.Tensor
    least: torch.Tensor
    bias: torch.Tensor | None = None
    bits: ClassVar[Literal[4]] = 4
    _packed: Packed | None = field(default=None, repr=False, compare=False)

    @classmethod
    def quantize(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int4Linear:
        """[out, in] floating point; each block's range is cut into 15 even steps. `in` must be a multiple of 32."""
        outputs, inputs = weight.shape
        if inputs % packed.BLOCK:
            raise UnsupportedModel(
                f"int4 needs layers whose inputs come in blocks of {packed.BLOCK}, not {inputs}: use int8"
            )
        blocks = weight.detach().float().view(outputs, -1, packed.BLOCK)
        least, most = blocks.amin(dim=-1), blocks.amax(dim=-1)
        step = ((most - least) / 15.0).half()
        least = least.half()
        inverse = torch.where(step > 0, 1.0 / step.float(), 0.0)
        values = ((blocks - least.float()[..., None]) * inverse[..., None]).round_().clamp_(0, 15).to(torch.uint8)
        pairs = values.view(outputs, inputs // 2, 2)
        return cls(pairs[..., 0] | pairs[..., 1] << 4, step, least, None if bias is None else bias.detach().float())

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], 2 * self.weight.shape[1]

    def values(self) -> torch.Tensor:
        """[out, in] float32 whole numbers in [0, 15]."""
        return torch.stack((self.weight & 15, self.weight >> 4), dim=-1).view(self.shape).float()

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        blocks = self.values().view(self.shape[0], -1, packed.BLOCK)
        return (blocks * self.step.float()[..., None] + self.least.float()[..., None]).view(self.shape)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] float32 -> [N, out] float32."""
        if kernels.library() is None or rows.device.type != "cpu":
            return self.portable(rows)
        if self._packed is None:
            self._packed = packed.Packed(self)
        return self._packed(rows.float())

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        outputs, inputs = self.shape
        whole, scale = quantize_rows(rows.float())
        whole = whole.view(len(rows), -1, packed.BLOCK)
        values = self.values().view(outputs, -1, packed.BLOCK)
        result = torch.zeros(len(rows), outputs, device=rows.device)
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
