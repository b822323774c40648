"""Linear layers with int8 weights and int8 activations, summed in integers.

Weights carry one scale per output, activations one per row and group of 64 inputs, found anew for every row. A group's
products are exact integers, and groups are added in ascending order as float32, so a row's result does not depend on
the rows beside it: every kernel gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import pad

from decodery.core.native.kernels import Form

from . import packed
from .packed import Native

STEP = float(np.float32(1) / np.float32(127))


@dataclass
class Int8Linear(Native):
    """A linear layer of 8-bit weights.

    Attributes:
        weight: [out, in] int8.
        scale: [out] float32.
        bias: [out] float32 or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None
    form: ClassVar[Form] = Form.ROWS8

    @classmethod
    def quantize(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
        """[out, in] floating point, rounded to 255 even steps per output."""
        weight = weight.detach().float()
        scale = weight.abs().amax(dim=1) / 127.0
        steps = weight / scale.clamp(min=1e-30)[:, None]
        whole = steps.round_().clamp_(-127, 127).to(torch.int8)
        return cls(whole, scale, None if bias is None else bias.detach().float())

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], self.weight.shape[1]

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        whole, scale = quantize_rows(rows.float())
        outputs = self.weight.shape[0]
        result = torch.zeros(len(rows), outputs, device=rows.device, dtype=torch.float32)
        for group in range(scale.shape[1]):
            span = slice(group * packed.GROUP, (group + 1) * packed.GROUP)
            weight = self.weight[:, span].float()
            # Sums of 64 products stay below 2^24: exact in float32, whatever the order.
            part = whole[:, group, : weight.shape[1]] @ weight.T
            result += part * scale[:, group, None]
        result *= self.scale
        return result if self.bias is None else result + self.bias

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        return self.weight.float() * self.scale[:, None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "scale": self.scale}
        return kept if self.bias is None else kept | {"bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> Int8Linear:
        """The layer that `tensors` came from."""
        return cls(tensors["weight"], tensors["scale"], tensors.get("bias"))


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, in] float32 -> integers in [-127, 127], [N, groups, 64] float32, and scales [N, groups]."""
    n, inputs = rows.shape
    groups = -(-inputs // packed.GROUP)
    parts = pad(rows, (0, groups * packed.GROUP - inputs)).view(n, groups, packed.GROUP)
    largest = parts.abs().amax(dim=-1)
    finite, tiny = largest.isfinite(), largest < 1e-30
    # PyTorch turns division by or of a plain number into multiplication by a rounded reciprocal, hence the tensor.
    inverse = torch.where(finite & ~tiny, torch.tensor(127.0, dtype=torch.float32, device="cpu") / largest, 0.0)
    scale = torch.where(finite, torch.where(tiny, 0.0, largest * STEP), torch.nan)
    return (parts * inverse[..., None]).round(), scale
