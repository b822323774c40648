"""Linear layers as the native kernels keep them."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from .kernels import LinearStruct, check, library

if TYPE_CHECKING:
    from .int4 import Int4Linear
    from .int8 import Int8Linear
    from .weights import Dense

    Packable: TypeAlias = Int8Linear | Int4Linear | Dense

GROUP = 64  # inputs that share one activation scale
BLOCK = 32  # inputs that share one step of 4-bit weights
BLOCK_BYTES = 640  # of a panel's 4-bit weights for one block
PANEL = 32  # outputs computed side by side


class Arena:
    """Memory for packed weights on huge pages where the system grants them; parts start at cache lines."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, max(size, 64))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._used = 0

    def take(self, size: int) -> np.ndarray:
        part = self._bytes[self._used : self._used + size]
        assert len(part) == size, "arena too small"
        self._used += -(-size // 64) * 64
        return part


class Packed:
    """One linear layer in the kernels' layout. `gated`: panels of 16 gates and the 16 values they open.

    One in floating point must have 16 bits.
    """

    def __init__(self, linear: Packable, arena: Arena | None = None, *, gated: bool = False) -> None:
        lib = library()
        assert lib is not None
        self.outputs, self.inputs = linear.shape
        order = self._order(self.outputs, gated)
        size = packed_size(linear, gated=gated)
        self._weight = (Arena(size) if arena is None else arena).take(size)
        weight, packed = linear.weight.contiguous(), self._weight.ctypes.data
        self._scale, half = None, 0
        if linear.bits == 8:
            lib.decodery_pack(weight.data_ptr(), self.inputs, order.ctypes.data, len(order), packed)
            self._scale = self._spread(linear.scale, order)
        elif linear.bits == 16:
            assert weight.dtype.itemsize == 2
            half = int(weight.dtype == torch.float16)
            lib.decodery_pack16(weight.data_ptr(), half, self.inputs, order.ctypes.data, len(order), packed)
        else:
            step, least = linear.step.contiguous(), linear.least.contiguous()
            lib.decodery_pack4(
                weight.data_ptr(), step.data_ptr(), least.data_ptr(), self.inputs, order.ctypes.data, len(order),
                packed,
            )  # fmt: skip
        self._bias = None if linear.bias is None else self._spread(linear.bias, order)
        scale, bias = (None if values is None else values.ctypes.data for values in (self._scale, self._bias))
        self.struct = LinearStruct(packed, scale, bias, self.inputs, self.outputs, linear.bits, half)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] float32 -> [N, out] float32."""
        lib = library()
        assert lib is not None
        rows = rows.contiguous()
        result = torch.empty(len(rows), self.outputs)
        if len(rows):
            check(lib.decodery_linear(ctypes.addressof(self.struct), rows.data_ptr(), len(rows), result.data_ptr()))
        return result

    @staticmethod
    def _order(outputs: int, gated: bool) -> np.ndarray:
        """Which row of the weight each packed output is, -1 for padding."""
        if not gated:
            order = np.full(-(-outputs // PANEL) * PANEL, -1, dtype=np.int32)
            order[:outputs] = np.arange(outputs)
            return order
        width, half = outputs // 2, PANEL // 2
        panels = -(-width // half)
        gates = np.full(panels * half, -1, dtype=np.int32)
        gates[:width] = np.arange(width)
        values = np.where(gates >= 0, gates + width, -1)
        return (
            np.concatenate((gates.reshape(panels, 1, half), values.reshape(panels, 1, half)), axis=1)
            .astype(np.int32)
            .ravel()
        )

    @staticmethod
    def _spread(values: torch.Tensor, order: np.ndarray) -> np.ndarray:
        known = values.detach().float().numpy()
        return np.where(order >= 0, known[np.maximum(order, 0)], np.float32(0)).astype(np.float32)


def packed_size(linear: Packable, *, gated: bool = False) -> int:
    """Bytes `Packed` takes from an arena."""
    outputs, inputs = linear.shape
    panels = -(-(outputs // 2) // (PANEL // 2)) if gated else -(-outputs // PANEL)
    if linear.bits == 16:
        return panels * PANEL * inputs * 2
    groups = -(-inputs // GROUP)
    return panels * groups * (PANEL * GROUP if linear.bits == 8 else 2 * BLOCK_BYTES)
