"""Linear layers of integers whose columns stand in an order of their own, as in GPTQ's act-order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.native.kernels import Form

from .block_linear import BlockLinear
from .int4 import Int4Linear
from .packed import Native


@dataclass
class ReorderedLinear(Native):
    """A linear layer whose rows are put into an order before they are rounded.

    Attributes:
        inner: The layer that reads them then.
        order: [in] int32 which input each of its columns belongs to.
    """

    inner: Int4Linear | BlockLinear
    order: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.inner.shape

    @property
    def form(self) -> Form:
        """What kernels call it."""
        return self.inner.form

    @property
    def bias(self) -> torch.Tensor | None:
        """[out] float32 or None."""
        return self.inner.bias

    def some(self, outputs: torch.Tensor) -> ReorderedLinear:
        """Only these outputs [k], in this order."""
        return ReorderedLinear(self.inner.some(outputs), self.order)

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        found = self.inner.dense()
        return torch.empty_like(found).index_copy_(1, self.order.long(), found)

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        return self.inner.portable(rows[:, self.order.long()])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        return self.inner.tensors() | {"order": self.order}
