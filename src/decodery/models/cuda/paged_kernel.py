"""Attention over pages of keys and values as Triton kernels: one launch for all texts of a pass."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..cache import coded
from .coded_kernel import encoded, numbers, scales

if TYPE_CHECKING:
    from ..torch.paged_rows import PagedRows

_SLOTS = tl.constexpr(16)
"""Slots of a page, as `page_pool.SLOTS`."""
_BLOCK = 64
_ROOM = {2: 16384, 4: 8192}
"""Bytes of a block of keys, by those of a number: two blocks of keys and two of values fit the 99 KB of a small card.
Products of float32 are written out number by number, and large blocks take minutes to compile."""
_MOST_PARTS = 16
_OFF_CUDA = 4
"""Multiprocessors that the interpreter counts on."""
_CODINGS = {coded.DTYPE: 1, coded.FLOATS: 2}
"""Numbers of the kernels for what pages hold; 0: numbers as they are."""
_CHANGING = ["places", "slots", "tiles", "begins", "bits", "rows", "words", "of_place", "of_head"]
"""What differs from pass to pass: a kernel is not compiled anew where one of these is 1 or a multiple of 16."""


@triton.jit(do_not_specialize=_CHANGING)
def _write(  # type: ignore[no-untyped-def]
    keys, values, key_pages, value_pages, key_scales, value_scales, table, places, slots,
    key_row, value_row, of_place, of_head,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    row, head, each = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    slot = tl.load(slots + row)
    page = tl.load(table + tl.load(places + row).to(tl.int64) * of_place + head * of_head + slot // _SLOTS)
    to = page.to(tl.int64) * PAGE + slot % _SLOTS * DIM + each
    inside = each < DIM
    key = tl.load(keys + row * key_row + head * DIM + each, mask=inside, other=0.0)
    value = tl.load(values + row * value_row + head * DIM + each, mask=inside, other=0.0)
    if CODED == 0:
        tl.store(key_pages + to, key, mask=inside)
        tl.store(value_pages + to, value, mask=inside)
    else:
        # Scales have two bytes, after the numbers of the page's slots.
        at = (page.to(tl.int64) * PAGE + _SLOTS * DIM) // 2 + slot % _SLOTS
        codes, scale = encoded(key, CODED)
        tl.store(key_pages + to, codes, mask=inside)
        tl.store(key_scales + at, scale)
        codes, scale = encoded(value, CODED)
        tl.store(value_pages + to, codes, mask=inside)
        tl.store(value_scales + at, scale)


@triton.jit(do_not_specialize=_CHANGING)
def _attend(  # type: ignore[no-untyped-def]
    queries, key_pages, value_pages, key_scales, value_scales, table, tiles, begins, bits, sinks, found, largest, sums,
    scale, cap, rows, query_row, of_place, of_head, words,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
    PAGE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tiles + tile * 5
    place, first, count = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
    length, total = tl.load(at + 3), tl.load(at + 4)
    each, dims = tl.arange(0, ROWS), tl.arange(0, WIDE)
    valid = (each // GROUP) < count
    row = (first + each // GROUP).to(tl.int64)
    head = kv_head * GROUP + each % GROUP
    wide = dims < DIM
    asked = tl.load(
        queries + row[:, None] * query_row + head[:, None] * DIM + dims[None, :],
        mask=valid[:, None] & wide[None, :], other=0.0,
    )  # fmt: skip
    begin = tl.load(begins + row, mask=valid, other=total)
    start = tl.min(begin, axis=0) // BLOCK * BLOCK
    own_part = tl.cdiv(tl.cdiv(total - start, BLOCK), PARTS) * BLOCK
    start += part * own_part
    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([ROWS], dtype=tl.float32)
    context = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for block in range(start, tl.minimum(start + own_part, total), BLOCK):
        slot = block + tl.arange(0, BLOCK)
        inside = slot < total
        page = tl.load(table + place * of_place + kv_head * of_head + slot // _SLOTS, mask=inside, other=0)
        at_slot = page.to(tl.int64) * PAGE + slot % _SLOTS * DIM
        at_scale = (page.to(tl.int64) * PAGE + _SLOTS * DIM) // 2 + slot % _SLOTS
        there = inside[:, None] & wide[None, :]
        keys = tl.load(key_pages + at_slot[:, None] + dims[None, :], mask=there, other=0)
        if CODED:
            keys = numbers(keys, CODED).to(asked.dtype)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        if CODED:
            scores *= scales(tl.load(key_scales + at_scale, mask=inside, other=0))[None, :]
        if CAPPED:
            scores = (1.0 - 2.0 / (tl.exp(scores * (2.0 / cap)) + 1.0)) * cap
        tentative = slot - length
        known = (tentative >= 0) & inside
        word = tl.load(
            bits + row[:, None] * words + (tentative // 32)[None, :], mask=valid[:, None] & known[None, :], other=0
        )
        ancestor = ((word >> (tentative % 32)[None, :]) & 1) != 0
        seen = tl.where(known[None, :], ancestor, (slot[None, :] >= begin[:, None]) & inside[None, :])
        scores = tl.where(seen & valid[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no largest score to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(best - base)
        mass = mass * shrink + tl.sum(weights, axis=1)
        values = tl.load(value_pages + at_slot[:, None] + dims[None, :], mask=there, other=0)
        if CODED:
            # Weights times small scales would be too small for float16.
            of_slots = scales(tl.load(value_scales + at_scale, mask=inside, other=0))
            values = (numbers(values, CODED) * of_slots[:, None]).to(asked.dtype)
        context = context * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    to = row * HEADS + head
    if PARTS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
            higher = tl.maximum(best, sink)
            shrink = tl.exp(best - higher)
            mass = mass * shrink + tl.exp(sink - higher)
            context = context * shrink[:, None]
        context = context / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(found + to[:, None] * DIM + dims[None, :], context, mask=valid[:, None] & wide[None, :])
    else:
        to += part.to(tl.int64) * rows * HEADS
        tl.store(largest + to, best, mask=valid)
        tl.store(sums + to, mass, mask=valid)
        tl.store(found + to[:, None] * DIM + dims[None, :], context, mask=valid[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["rows"])
def _join(  # type: ignore[no-untyped-def]
    parts, largest, sums, sinks, found, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, head, dims = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    to, part = row * HEADS + head, tl.arange(0, PARTS).to(tl.int64) * rows * HEADS
    best = tl.load(largest + to + part)
    higher = tl.max(best, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(higher, sink)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(best - base)
    mass = tl.sum(tl.load(sums + to + part) * shrink, axis=0)
    if SINKS:
        mass += tl.exp(sink - base)
    wide = dims < DIM
    each = tl.load(parts + (to + part)[:, None] * DIM + dims[None, :], mask=wide[None, :], other=0.0)
    context = tl.sum(each * shrink[:, None], axis=0) / tl.where(mass == 0.0, 1.0, mass)
    tl.store(found + to * DIM + dims, context, mask=wide)


def attend(
    step: PagedRows,
    table: torch.Tensor,
    kind: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """`PagedRows.attend` by kernels: two launches, and a third where a text's slots are shared out.

    Args:
        step: The rows.
        table: [places, kv_heads, columns] the page tables of a layer.
        kind, queries, keys, values, scale, cap, sinks: See there.
        parts: How many programs share the slots of a text, a power of two; None for as many as fill the device.
    """
    (rows, heads, dim), kv_heads, layout = queries.shape, keys.shape[1], step.layout
    queries, keys, values = (
        each if each.stride()[1:] == (dim, 1) else each.contiguous() for each in (queries, keys, values)
    )
    wide, group, of_place, of_head = triton.next_power_of_2(dim), heads // kv_heads, table.stride(0), table.stride(1)
    wide, pool = max(wide, 16), step.pool
    pages, coding = pool.data, _CODINGS.get(pool.dtype, 0)
    scale_pages = pages.view(torch.int16) if coding else pages
    held = (*pages, *scale_pages)
    page = pages.stride(1)
    _write[rows, kv_heads](
        keys, values, *held, table, step.places, step.slots, keys.stride(0), values.stride(0),
        of_place, of_head, DIM=dim, WIDE=wide, PAGE=page, CODED=coding,
    )  # fmt: skip
    found = torch.empty((rows, heads, dim), dtype=queries.dtype, device=queries.device)
    if parts is None:
        programs = layout.tiles * kv_heads
        parts = min(max(_power(2 * _multiprocessors(queries.device) // programs), 1), _MOST_PARTS)
    into, best, mass = found, found, found
    if parts > 1:
        into = torch.empty((parts, rows, heads, dim), dtype=torch.float32, device=queries.device)
        best, mass = torch.empty((2, parts, rows, heads), dtype=torch.float32, device=queries.device)
    _attend[layout.tiles, kv_heads, parts](
        queries, *held, table, step.tiles, step.begins[kind], step.bits[kind],
        found if sinks is None else sinks, into, best, mass,
        scale, cap, rows, queries.stride(0), of_place, of_head, layout.words,
        HEADS=heads, GROUP=group, DIM=dim, WIDE=wide,
        ROWS=max(triton.next_power_of_2(layout.tile_rows * group), 16), BLOCK=block_of(wide, queries.dtype),
        CAPPED=cap != 0.0, SINKS=sinks is not None, PARTS=parts, PAGE=page, CODED=coding,
    )  # fmt: skip
    if parts > 1:
        _join[rows, heads](
            into, best, mass, found if sinks is None else sinks, found, rows,
            HEADS=heads, DIM=dim, WIDE=wide, SINKS=sinks is not None, PARTS=parts,
        )  # fmt: skip
    return found.view(rows, heads * dim)


def block_of(wide: int, dtype: torch.dtype) -> int:
    """Slots that a program attends to at a time.

    Args:
        wide: Of a head, a power of two.
        dtype: Of queries.
    """
    return max(min(_ROOM[dtype.itemsize] // (wide * dtype.itemsize), _BLOCK), 16)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _OFF_CUDA


def _power(number: int) -> int:
    """The greatest power of two that is no larger, 0 of 0."""
    return 1 << number.bit_length() - 1 if number else 0
