"""Linear layers with weights of -1, 0 and 1 and int8 activations, summed in integers.

The arithmetic is that of an `Int8Linear` with these weights, to the bit; a weight takes two bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import Form

from .int8 import Int8Linear
from .packed import Native

PER_BYTE = 4


@dataclass
class TernaryLinear(Native):
    """A linear layer of ternary weights.

    Attributes:
        weight: [out, in / 4] uint8, value + 1 of four inputs, the first lowest.
        scale: [out] float32.
        bias: [out].
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.ROWS2

    @classmethod
    def of(cls, trits: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> TernaryLinear:
        """The layer of given ternary weights.

        Args:
            trits: [out, in] of any dtype, -1, 0 or 1; `in` must be a multiple of 4.
            scale: [out] float32.
        """
        outputs, inputs = trits.shape
        if inputs % PER_BYTE:
            raise UnsupportedModel(f"ternary weights need layers whose inputs come in fours, not {inputs}: use int8")
        first, second, third, fourth = (trits + 1).to(torch.uint8).view(outputs, -1, PER_BYTE).unbind(-1)
        return cls(first | second << 2 | third << 4 | fourth << 6, scale, bias)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], PER_BYTE * self.weight.shape[1]

    def values(self) -> torch.Tensor:
        """[out, in] int8 -1, 0 and 1."""
        places = torch.arange(0, 2 * PER_BYTE, 2, dtype=torch.uint8, device=self.weight.device)
        return ((self.weight[..., None] >> places & 3).to(torch.int8) - 1).view(self.shape)

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        return self.values() * self.scale[:, None]

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        return Int8Linear(self.values(), self.scale, self.bias).portable(rows)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "scale": self.scale}
        return kept if self.bias is None else kept | {"bias": self.bias}
