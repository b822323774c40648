"""Linear layers as the native kernels keep them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch

from decodery.core.mapped_memory import anonymous
from decodery.core.native import kernels
from decodery.core.native.kernels import Form, address, check, library
from decodery.core.native.structs import LinearStruct

if TYPE_CHECKING:
    from ..torch.weights import Dense
    from .block_linear import BlockLinear
    from .floats import Float4Linear, Float8Linear, MXFP4Linear, NF4Linear
    from .int4 import Int4Linear
    from .int8 import Int8Linear
    from .reordered import ReorderedLinear
    from .super_blocks import SuperBlockLinear
    from .ternary import TernaryLinear

    Packable: TypeAlias = (
        Int8Linear
        | TernaryLinear
        | Int4Linear
        | BlockLinear
        | SuperBlockLinear
        | Float4Linear
        | Float8Linear
        | MXFP4Linear
        | NF4Linear
        | Dense
    )

GROUP = 64  # inputs that share one activation scale
BLOCK = 32  # inputs of a block of weights
SUPER = 256  # inputs of a super-block
FLOAT_GROUP = 128  # inputs that share a scale of weights of eight bits in floating point
CODE_GROUP = 64  # and of codes of four bits
PANEL = 32  # outputs computed side by side
SUPER_BYTES = {
    Form.SUPER4: 640 + 8 * 512,
    Form.SUPER_TABLE4: 320 + 8 * 512,
    Form.SUPER5: 640 + 8 * 640,
    Form.SUPER6: 576 + 8 * 768,
}
"""Of a panel's super-block: see csrc/state.h."""
BITS = {
    **{Form.BLOCKS4: 4, Form.TABLE4: 4, Form.BLOCKS5: 5, Form.BLOCKS6: 6, Form.BLOCKS8: 8},
    **{Form.SUPER4: 4, Form.SUPER_TABLE4: 4, Form.SUPER5: 5, Form.SUPER6: 6, Form.FLOAT4: 4, Form.CODES4: 4},
    Form.MXFP4: 4,
}
"""Of a number in a block."""


class Arena:
    """Memory for packed weights on huge pages where the system grants them; parts start at cache lines."""

    def __init__(self, size: int) -> None:
        self._memory = anonymous(max(size, 64))
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._used = 0

    def take(self, size: int) -> np.ndarray:
        part = self._bytes[self._used : self._used + size]
        assert len(part) == size, "arena too small"
        self._used += -(-size // 64) * 64
        return part


class Packed:
    """One linear layer in the kernels' layout.

    One in floating point must have 16 bits.

    Args:
        gated: Panels of 16 gates and the 16 values they open.
    """

    def __init__(self, linear: Packable | ReorderedLinear, arena: Arena | None = None, *, gated: bool = False) -> None:
        lib = library()
        assert lib is not None
        self.outputs, self.inputs = linear.shape
        order = self._order(self.outputs, gated)
        size = packed_size(linear, gated=gated)
        self._weight = (Arena(size) if arena is None else arena).take(size)
        packed, form = self._weight.ctypes.data, linear.form
        self._scale = None
        # Which inputs its columns belong to, where these are not the inputs in turn.
        self._columns = getattr(linear, "order", None)
        matrix: Any = getattr(linear, "inner", linear)
        if (rows := getattr(matrix, "rows", None)) is not None:
            rows.pack(order, packed)
        else:
            self._lay_out(matrix, order, packed)
        if form in (Form.ROWS8, Form.ROWS2, Form.FLOAT4):
            self._scale = self._spread(matrix.scale, order)
        self._bias = None if linear.bias is None else self._spread(linear.bias, order)
        scale, bias = (None if values is None else values.ctypes.data for values in (self._scale, self._bias))
        columns = None if self._columns is None else address(self._columns, torch.int32, self.inputs)
        self.struct = LinearStruct(packed, scale, bias, self.inputs, self.outputs, form, columns)

    def _lay_out(self, linear: Packable, order: np.ndarray, packed: int) -> None:
        """From tensors to an address."""
        lib = library()
        assert lib is not None
        weight, form, outputs, inputs = linear.weight.contiguous(), linear.form, self.outputs, self.inputs
        if form == Form.ROWS8:
            lib.decodery_pack(
                address(weight, torch.int8, outputs, inputs), inputs, order.ctypes.data, len(order), packed
            )
        elif form == Form.ROWS2:
            begin = address(weight, torch.uint8, outputs, inputs // 4)
            lib.decodery_pack_ternary(begin, inputs, order.ctypes.data, len(order), packed)
        elif form == Form.FLOAT8:
            scales = linear.group_scales.contiguous()  # type: ignore[union-attr]
            begin = address(weight, torch.uint8, outputs, inputs)
            scale = address(scales, torch.float32, outputs, -(-inputs // FLOAT_GROUP))
            lib.decodery_pack8(begin, scale, inputs, order.ctypes.data, len(order), packed)
        elif form == Form.CODES4:
            scales = linear.code_scales.contiguous()  # type: ignore[union-attr]
            table = linear.table.ctypes.data  # type: ignore[union-attr]
            begin = address(weight, torch.uint8, outputs, inputs // 2)
            scale = address(scales, torch.float32, outputs, -(-inputs // CODE_GROUP))
            lib.decodery_pack_codes(begin, scale, table, inputs, order.ctypes.data, len(order), packed)
        elif form in SUPER_BYTES:
            scales, integers = linear.scales.contiguous(), linear.integers.contiguous()  # type: ignore[union-attr]
            begin = address(weight, torch.uint8, outputs, inputs * BITS[form] // 8)
            scale = address(scales, torch.float16, outputs, inputs // SUPER, scales.shape[2])
            integer = address(integers.view(torch.uint8), torch.uint8, outputs, inputs // BLOCK, 2)
            lib.decodery_pack_supers(form, begin, scale, integer, inputs, order.ctypes.data, len(order), packed)
        elif form in BITS:
            mxfp4 = form == Form.MXFP4
            scales = (linear.exponents if mxfp4 else linear.scales).contiguous()  # type: ignore[union-attr]
            begin = address(weight, torch.uint8, outputs, inputs * BITS[form] // 8)
            blocks = (outputs, inputs // BLOCK)
            count = 1 if form == Form.BLOCKS8 else 2
            scale = address(scales, torch.uint8, *blocks) if mxfp4 else address(scales, torch.float16, *blocks, count)
            lib.decodery_pack_blocks(form, begin, scale, inputs, order.ctypes.data, len(order), packed)
        else:
            begin = address(weight, torch.bfloat16 if form == Form.BFLOAT16 else torch.float16, outputs, inputs)
            lib.decodery_pack16(form, begin, inputs, order.ctypes.data, len(order), packed)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] float32 -> [N, out] float32."""
        lib = library()
        assert lib is not None
        rows = rows.contiguous()
        result = torch.empty(len(rows), self.outputs, dtype=torch.float32, device="cpu")
        if len(rows):
            read, written = (
                address(each, torch.float32, len(rows), width)
                for each, width in ((rows, self.inputs), (result, self.outputs))
            )
            check(lib.decodery_linear(ctypes.addressof(self.struct), read, len(rows), written))
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


class Native(ABC):
    """A linear layer of integers, on the native kernels or with the same bits in PyTorch."""

    _packed: Packed | None = None

    def some(self, outputs: torch.Tensor) -> Self:
        """Only these outputs [k], in this order."""
        layer: Any = self
        parts = {each.name: getattr(self, each.name) for each in fields(layer)}
        chosen = {name: part[outputs] for name, part in parts.items() if isinstance(part, torch.Tensor)}
        return replace(layer, **chosen)

    @abstractmethod
    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] float32 -> [N, out] float32, in PyTorch alone."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] float32 -> [N, out] float32."""
        if kernels.library() is None or rows.device.type != "cpu":
            return self.portable(rows)
        if self._packed is None:
            self._packed = Packed(self)  # type: ignore[arg-type]
        return self._packed(rows.float())


def packed_size(linear: Packable | ReorderedLinear, *, gated: bool = False) -> int:
    """Bytes `Packed` takes from an arena."""
    outputs, inputs = linear.shape
    panels = -(-(outputs // 2) // (PANEL // 2)) if gated else -(-outputs // PANEL)
    return panels * panel_bytes(linear.form, inputs)


def panel_bytes(form: Form, inputs: int) -> int:
    """Of a panel."""
    if form in (Form.BFLOAT16, Form.FLOAT16):
        return PANEL * inputs * 2
    if form == Form.FLOAT8:
        return -(-inputs // FLOAT_GROUP) * (4 + FLOAT_GROUP) * PANEL
    if form == Form.CODES4:
        # A table of 16 floats comes first.
        return 64 + -(-inputs // CODE_GROUP) * (4 + CODE_GROUP // 2) * PANEL
    if form in SUPER_BYTES:
        return inputs // SUPER * SUPER_BYTES[form]
    groups = -(-inputs // GROUP)
    if form in (Form.ROWS8, Form.ROWS2):
        return groups * PANEL * GROUP // (1 if form == Form.ROWS8 else 4)
    # Two scales of half precision, or one, or an exponent, and 32 numbers for each output of a block.
    scales = {Form.MXFP4: 1, Form.BLOCKS8: 2}.get(form, 4)
    return groups * (GROUP // BLOCK) * PANEL * (scales + BLOCK * BITS[form] // 8)
