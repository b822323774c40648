"""Rows times packed weights as one Triton kernel, which unpacks each tile of weights where it multiplies it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..native.packed import SUPER

if TYPE_CHECKING:
    from ..torch.packed_linear import PackedLinear

_SUPER = tl.constexpr(SUPER)
_INPUTS, _OUTPUTS, _MOST_ROWS = 64, 32, 64
"""Inputs and outputs of a tile, and rows of one at most."""


@triton.jit
def _codes(codes, out, each, there, INPUTS: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[outputs, inputs] int32 codes of a tile."""
    begin = codes + out.to(tl.int64)[:, None] * (INPUTS * BITS // 8)
    if BITS == 8:
        return tl.load(begin + each[None, :], mask=there, other=0).to(tl.int32)
    low = tl.load(begin + each[None, :] // 2, mask=there, other=0).to(tl.int32)
    found = (low >> (each[None, :] % 2 * 4)) & 15
    if BITS > 4:
        more: tl.constexpr = BITS - 4
        high = tl.load(begin + INPUTS // 2 + each[None, :] * more // 8, mask=there, other=0).to(tl.int32)
        found = found | ((high >> (each[None, :] * more % 8)) & ((1 << more) - 1)) << 4
    return found


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    values, supers, out, first, inside,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, SUPERS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[outputs, inputs] float32 of a tile what groups of inputs have; one load for each of them."""
    count: tl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    groups: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    group = first // GROUP + tl.arange(0, count)
    there = inside[:, None] & (group[None, :] < groups)
    found = tl.load(values + out.to(tl.int64)[:, None] * groups + group[None, :], mask=there, other=0).to(tl.float32)
    if SUPERS:
        of_supers = supers + out.to(tl.int64)[:, None] * (INPUTS // _SUPER) + group[None, :] * GROUP // _SUPER
        found *= tl.load(of_supers, mask=there, other=0.0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(found[:, :, None], (OUT, count, BLOCK // count)), (OUT, BLOCK))


@triton.jit(do_not_specialize=["count"])
def _product(  # type: ignore[no-untyped-def]
    rows, codes, table, steps, supers, leasts, least_supers, scale, bias, found, count, outputs, row_size,
    INPUTS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    TABLED: tl.constexpr, STEPS: tl.constexpr, SUPERS: tl.constexpr, LEASTS: tl.constexpr, LEAST_SUPERS: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, out = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * OUT + tl.arange(0, OUT)
    valid, inside = row < count, out < outputs
    total = tl.zeros([ROWS, OUT], dtype=tl.float32)
    for first in range(0, INPUTS, BLOCK):
        each = first + tl.arange(0, BLOCK)
        known = each < INPUTS
        read = tl.load(
            rows + row.to(tl.int64)[:, None] * row_size + each[None, :], mask=valid[:, None] & known[None, :], other=0.0
        )
        code = _codes(codes, out, each, inside[:, None] & known[None, :], INPUTS, BITS)
        weight = tl.load(table + code) if TABLED else (code - ZERO).to(tl.float32)
        if STEPS:
            weight *= _spread(steps, supers, out, first, inside, INPUTS, GROUP, SUPERS, OUT, BLOCK)
        if LEASTS:
            weight += _spread(leasts, least_supers, out, first, inside, INPUTS, GROUP, LEAST_SUPERS, OUT, BLOCK)
        total += tl.dot(read, tl.trans(weight.to(read.dtype)), input_precision="ieee")
    if SCALED:
        total *= tl.load(scale + out, mask=inside, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = found + row.to(tl.int64)[:, None] * outputs + out[None, :]
    tl.store(to, total, mask=valid[:, None] & inside[None, :])


def product(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    """`PackedLinear.__call__` by a kernel: one launch.

    Args:
        layer: The layer.
        rows: [N, in], columns in the order of the weights'.

    Returns:
        [N, out], in the rows' dtype.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, (outputs, inputs) = len(rows), layer.shape
    found = rows.new_empty(count, outputs)
    height = min(max(triton.next_power_of_2(count), 16), _MOST_ROWS)
    parts = (
        layer.table, layer.steps, layer.supers, layer.leasts, layer.least_supers, layer.scale, layer.bias,
    )  # fmt: skip
    names = ("TABLED", "STEPS", "SUPERS", "LEASTS", "LEAST_SUPERS", "SCALED", "BIASED")
    # Where a part is missing, another address stands for it, which nothing reads.
    pointers = [found if part is None else part for part in parts]
    _product[-(-outputs // _OUTPUTS), -(-count // height)](
        rows, layer.codes, *pointers, found, count, outputs, rows.stride(0),
        INPUTS=inputs, BITS=layer.bits, ZERO=layer.zero, GROUP=layer.group,
        **{name: part is not None for name, part in zip(names, parts, strict=True)},
        ROWS=height, OUT=_OUTPUTS, BLOCK=_INPUTS,
    )  # fmt: skip
    return found
