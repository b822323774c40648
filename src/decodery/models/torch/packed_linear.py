"""Linear layers whose weights stay packed on a device: they become numbers tile by tile, as they are multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch.nn.functional import linear

from decodery.core.native.kernels import Form

from ..config import ModelConfig
from ..cuda.launches import launches
from ..native.block_linear import TABLE, BlockLinear, stored_numbers
from ..native.floats import NF4, TWICE, Float4Linear, Float8Linear, MXFP4Linear, NF4Linear, powers
from ..native.int4 import Int4Linear
from ..native.int8 import Int8Linear
from ..native.packed import BITS, CODE_GROUP, FLOAT_GROUP, SUPER
from ..native.reordered import ReorderedLinear
from ..native.super_blocks import SuperBlockLinear, has_least
from .weights import Dense, Linear, Weights, exchanged

_MANY = 512
"""Rows from which on writing the weights out once costs less than to unpack them for every few rows."""
_BYTES = 128
"""What bytes that stand for integers are counted from."""


@dataclass
class PackedLinear:
    """A layer of codes: a weight is scale * (number * step + least), with steps for groups of inputs.

    Attributes:
        codes: [out, in * bits / 8] uint8, in the order of `BlockLinear.weight`.
        bits: Of a code.
        zero: The code that stands for 0.
        group: Inputs that share a step.
        dtype: Of the rows it reads.
        table: [2^bits] float32 what codes stand for, None where it is code - zero.
        steps: [out, groups], None for 1; times supers [out, in / 256] where there are these.
        leasts: [out, groups], None for 0; times least_supers [out, in / 256] where there are these.
        scale: [out] float32, None for 1.
        order: [in] int64 which input each column belongs to, None for the inputs in turn.
        bias: [out].
    """

    codes: torch.Tensor
    bits: int
    zero: int
    group: int
    dtype: torch.dtype
    table: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    supers: torch.Tensor | None = None
    leasts: torch.Tensor | None = None
    least_supers: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    order: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.codes), 8 * self.codes.shape[1] // self.bits

    def some(self, outputs: torch.Tensor | slice) -> Self:
        """Only these outputs [k], in this order; a slice of them shares memory."""
        whole = ("table", "order")
        parts: dict[str, Any] = {name: part[outputs] for name, part in self.tensors().items() if name not in whole}
        return replace(self, **parts)

    def to(self, device: torch.device) -> Self:
        """The layer on a device."""
        parts: dict[str, Any] = {name: part.to(device) for name, part in self.tensors().items()}
        return replace(self, **parts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that this layer is made of, by name."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part for name, part in known.items() if isinstance(part, torch.Tensor)}

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        inputs = self.shape[1]
        numbers = self.codes if self.bits == 8 else stored_numbers(self.codes, inputs, self.bits)
        found = numbers.float() - self.zero if self.table is None else self.table[numbers.long()]
        spread = torch.arange(inputs, device=found.device)
        for part, more, adds in ((self.steps, self.supers, False), (self.leasts, self.least_supers, True)):
            if part is not None:
                each = part.float()[:, spread // self.group]
                each = each if more is None else each * more.float()[:, spread // SUPER]
                found = found + each if adds else found * each
        found = found if self.scale is None else found * self.scale[:, None]
        return found if self.order is None else torch.empty_like(found).index_copy_(1, self.order, found)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out], in the rows' dtype."""
        kernel = packed_kernel(rows) if len(rows) <= _MANY else None
        if kernel is not None:
            with torch.cuda.device_of(rows):
                return kernel(self, rows if self.order is None else rows[:, self.order])
        return linear(rows, self.dense().to(rows.dtype), None if self.bias is None else self.bias.to(rows.dtype))


def packed_kernel(rows: torch.Tensor) -> Callable[[PackedLinear, torch.Tensor], torch.Tensor] | None:
    """The kernel for rows on their device; None where there is none, and PyTorch does it."""
    if rows.device.type != "cuda" or rows.dtype.itemsize > 4 or not launches(rows.device):
        return None
    from ..cuda.packed_kernel import product

    return product


def packed_linear(layer: Linear, dtype: torch.dtype) -> PackedLinear | None:
    """A quantized layer for rows of this type, on its device; None for a kind that is not kept so."""
    if isinstance(layer, ReorderedLinear):
        inner = packed_linear(layer.inner, dtype)
        return None if inner is None else replace(inner, order=layer.order.long())
    if isinstance(layer, Int8Linear):
        codes = (layer.weight.view(torch.uint8) ^ _BYTES).contiguous()
        return PackedLinear(codes, 8, _BYTES, layer.shape[1], dtype, scale=layer.scale, bias=layer.bias)
    if isinstance(layer, Int4Linear):
        return PackedLinear(layer.weight, 4, 0, 32, dtype, steps=layer.step, leasts=layer.least, bias=layer.bias)
    if isinstance(layer, Float4Linear):
        known: dict[str, Any] = {"table": _table(TWICE, layer.weight), "steps": layer.half_steps, "scale": layer.scale}
        return PackedLinear(layer.weight, 4, 0, 16, dtype, bias=layer.bias, **known)
    if isinstance(layer, MXFP4Linear):
        known = {"table": _table(TWICE, layer.weight), "steps": powers(layer.exponents) / 2}
        return PackedLinear(layer.weight, 4, 0, 32, dtype, bias=layer.bias, **known)
    if isinstance(layer, NF4Linear):
        known = {"table": _table(NF4, layer.weight), "steps": layer.code_scales}
        return PackedLinear(layer.weight, 4, 0, CODE_GROUP, dtype, bias=layer.bias, **known)
    if isinstance(layer, Float8Linear):
        every = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
        known = {"table": every.to(layer.weight.device), "steps": layer.group_scales}
        return PackedLinear(layer.weight, 8, 0, FLOAT_GROUP, dtype, bias=layer.bias, **known)
    if isinstance(layer, BlockLinear):
        return _blocks(layer, dtype)
    return _super_blocks(layer, dtype) if isinstance(layer, SuperBlockLinear) else None


def _blocks(layer: BlockLinear, dtype: torch.dtype) -> PackedLinear:
    if layer.bits == 5:
        steps, leasts = (each.contiguous() for each in layer.scales.unbind(2))
        return PackedLinear(layer.weight, 5, 0, 32, dtype, steps=steps, leasts=leasts, bias=layer.bias)
    table = _table(TABLE, layer.weight) if layer.bits == 4 else None
    zero, steps = {4: 0, 6: 32, 8: _BYTES}[layer.bits], layer.scales.flatten(1)
    group = 32 if layer.bits == 8 else 16
    return PackedLinear(layer.weight, layer.bits, zero, group, dtype, table=table, steps=steps, bias=layer.bias)


def _super_blocks(layer: SuperBlockLinear, dtype: torch.dtype) -> PackedLinear:
    bits, supers = BITS[layer.form], layer.scales[..., 0].contiguous()
    if has_least(layer.form):
        steps, leasts = (each.contiguous() for each in layer.integers.unbind(2))
        known: dict[str, Any] = {"leasts": leasts, "least_supers": -layer.scales[..., 1]}
        return PackedLinear(layer.weight, bits, 0, 32, dtype, steps=steps, supers=supers, bias=layer.bias, **known)
    known = {"table": _table(TABLE, layer.weight) if layer.form == Form.SUPER_TABLE4 else None}
    zero, steps = 32 if layer.form == Form.SUPER6 else 0, layer.integers.flatten(1)
    return PackedLinear(layer.weight, bits, zero, 16, dtype, steps=steps, supers=supers, bias=layer.bias, **known)


def _table(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(like.device)


def packed_weights(weights: Weights, dtype: torch.dtype, device: torch.device) -> Weights:
    """Weights on a device: what is quantized stays packed.

    Args:
        weights: The weights.
        dtype: Of the rows that packed weights read; matrices in floating point get it.
        device: The device.
    """

    def moved(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, torch.Tensor):
            return part.to(device)
        if (found := packed_linear(part, dtype)) is not None:
            return found.to(device)
        parts = {each.name: getattr(part, each.name) for each in fields(part)}
        kind = dtype if isinstance(part, Dense) else None
        return replace(
            part, **{name: each.to(device, kind) for name, each in parts.items() if isinstance(each, torch.Tensor)}
        )

    whole = {name: moved(getattr(weights, name)) for name in ("norm", "positions", "head")}
    return Weights(embedding=weights.embedding.to(device, dtype), **whole, **exchanged(weights, moved))


def packs(config: ModelConfig) -> bool:
    """Whether a model's layers multiply by whole matrices or experts, which may then stay packed."""
    apart = config.experts_beside or config.short_conv or config.layer_inputs or config.alternating
    apart = apart or config.kept_tokens
    return not (apart or config.latent or config.shared or config.shortcuts or config.reused_layers)
