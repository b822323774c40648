"""Rows times packed weights as one Triton kernel, which unpacks each tile of weights where it multiplies it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..native.packed import SUPER
from .paged_kernel import _multiprocessors, _power

if TYPE_CHECKING:
    from ..torch.packed_linear import PackedLinear

_SUPER = tl.constexpr(SUPER)
_ADDED = 512
_INPUTS, _OUTPUTS, _MOST_ROWS = 64, 32, 64
"""Inputs and outputs of a tile, and rows of one at most."""
_PROGRAMS, _MOST_PARTS, _LEAST_TILES = 4, 16, 4
"""Programs that a multiprocessor is to have: one alone waits for memory; parts that inputs are shared out in at most,
and tiles that each goes through at least."""


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
    OWN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(2) * OWN
    row, out = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * OUT + tl.arange(0, OUT)
    valid, inside = row < count, out < outputs
    total = tl.zeros([ROWS, OUT], dtype=tl.float32)
    for first in range(begin, tl.minimum(begin + OWN, INPUTS), BLOCK):
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
    if PARTS == 1:
        if SCALED:
            total *= tl.load(scale + out, mask=inside, other=0.0)[None, :]
        if BIASED:
            total += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = found + (tl.program_id(2).to(tl.int64) * count + row)[:, None] * outputs + out[None, :]
    tl.store(to, total, mask=valid[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count"])
def _add(  # type: ignore[no-untyped-def]
    parts, scale, bias, found, count, outputs,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, out = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = out < outputs
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (part * count + row) * outputs + out, mask=inside, other=0.0)
    if SCALED:
        total *= tl.load(scale + out, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + row * outputs + out, total, mask=inside)


def product(layer: PackedLinear, rows: torch.Tensor, parts: int | None = None) -> torch.Tensor:
    """`PackedLinear.__call__` by a kernel: one launch, two where programs share inputs out.

    Args:
        layer: The layer.
        rows: [N, in], columns in the order of the weights'.
        parts: How many programs share the inputs of an output; None for as many as fill the device.

    Returns:
        [N, out], in the rows' dtype.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, (outputs, inputs) = len(rows), layer.shape
    found = rows.new_empty(count, outputs)
    height = min(max(triton.next_power_of_2(count), 16), _MOST_ROWS)
    tiles, programs = -(-inputs // _INPUTS), -(-outputs // _OUTPUTS) * -(-count // height)
    if parts is None and count > _MOST_ROWS:
        # So many fill a device, and another number of parts would be compiled anew.
        parts = 1
    elif parts is None:
        parts = _power(min(_PROGRAMS * _multiprocessors(rows.device) // programs, tiles // _LEAST_TILES, _MOST_PARTS))
    own = -(-tiles // max(parts, 1)) * _INPUTS
    # Some of the last would have nothing to do.
    parts = -(-inputs // own)
    into = found if parts == 1 else rows.new_empty(parts, count, outputs, dtype=torch.float32)
    more = (
        layer.table, layer.steps, layer.supers, layer.leasts, layer.least_supers, layer.scale, layer.bias,
    )  # fmt: skip
    names = ("TABLED", "STEPS", "SUPERS", "LEASTS", "LEAST_SUPERS", "SCALED", "BIASED")
    # Where a part is missing, another address stands for it, which nothing reads.
    pointers = [found if part is None else part for part in more]
    has = {name: part is not None for name, part in zip(names, more, strict=True)}
    _product[-(-outputs // _OUTPUTS), -(-count // height), parts](
        rows, layer.codes, *pointers, into, count, outputs, rows.stride(0),
        INPUTS=inputs, BITS=layer.bits, ZERO=layer.zero, GROUP=layer.group,
        **has, ROWS=height, OUT=_OUTPUTS, BLOCK=_INPUTS, OWN=own, PARTS=parts,
    )  # fmt: skip
    if parts > 1:
        _add[count, triton.cdiv(outputs, _ADDED)](
            into, *pointers[-2:], found, count, outputs,
            SCALED=has["SCALED"], BIASED=has["BIASED"], PARTS=parts, BLOCK=_ADDED,
        )  # fmt: skip
    return found
