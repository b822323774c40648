"""What a layer does to rows between its matrices, a Triton kernel each: norms, rotations, gates.

Numbers are read once, worked on in float32, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATES = {"silu": 1, "gelu_tanh": 2}
"""Numbers of the activations that a kernel has."""
_BLOCK = 1024
_WARP = 512
"""Numbers of a row that a warp works on; a row has up to eight."""


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    rows, branches, weight, sums, found, row_size, branch_size, eps,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row, each = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = each < WIDTH
    read = tl.load(rows + row * row_size + each, mask=inside, other=0.0)
    if ADDS:
        branch = tl.load(branches + row * branch_size + each, mask=inside, other=0.0)
        # The stream has the rows' bits, and its norm is that of these.
        read = (read.to(tl.float32) + branch.to(tl.float32)).to(read.dtype)
        tl.store(sums + row * WIDTH + each, read, mask=inside)
    wide = read.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weights = tl.load(weight + each, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + row * WIDTH + each, wide * scale * weights, mask=inside)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    rows, cos, sin, query_norm, key_norm, found, row_size, heads, eps,
    ALL: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row, head, each = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    inside = each < HALF
    at = rows + row * row_size + head * 2 * HALF + each
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * HALF) + eps)
        # Compared as a block: Triton 3.9's interpreter takes no mask that a scalar was part of.
        own = head + 0 * each
        of_query, of_key = inside & (own < heads), inside & (own >= heads)
        # What a mask leaves out is 0.
        weight = tl.load(query_norm + each, mask=of_query, other=0.0).to(tl.float32)
        first *= scale * (weight + tl.load(key_norm + each, mask=of_key, other=0.0).to(tl.float32))
        weight = tl.load(query_norm + HALF + each, mask=of_query, other=0.0).to(tl.float32)
        second *= scale * (weight + tl.load(key_norm + HALF + each, mask=of_key, other=0.0).to(tl.float32))
    c = tl.load(cos + row * HALF + each, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * HALF + each, mask=inside, other=0.0).to(tl.float32)
    to = found + (row * ALL + head) * 2 * HALF + each
    tl.store(to, first * c - second * s, mask=inside)
    tl.store(to + HALF, second * c + first * s, mask=inside)


@triton.jit
def _gate(  # type: ignore[no-untyped-def]
    rows, found, inner, row_size, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, each = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = each < inner
    gate = tl.load(rows + row * row_size + each, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(rows + row * row_size + inner + each, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if KIND == 2:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # A half of 1 + tanh(x) is the sigmoid of 2 x.
    tl.store(found + row * inner + each, gate / (1.0 + tl.exp(-slope)) * up, mask=inside)


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of rows [N, width], whose weights may have another type."""
    return _normed(rows, None, weight, eps)[1]


def add_norm(
    rows: torch.Tensor, branches: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, width] with what is added to them, and the norm of that."""
    return _normed(rows, branches, weight, eps)


def _normed(
    rows: torch.Tensor, branches: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (count, width), rows = rows.shape, _dense(rows)
    branches = None if branches is None else _dense(branches)
    wide, adds = triton.next_power_of_2(width), branches is not None
    found = rows.new_empty(count, width)
    sums = found if branches is None else torch.empty_like(found)
    more = rows if branches is None else branches
    with torch.cuda.device_of(rows):
        _norm[(count,)](
            rows, more, weight, sums, found, rows.stride(0), more.stride(0), eps,
            WIDTH=width, WIDE=wide, ADDS=adds, num_warps=min(max(wide // _WARP, 1), 8),
        )  # fmt: skip
    return sums, found


def turn(
    rows: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> torch.Tensor:
    """Queries and keys [N, heads + kv_heads, dim], normed where they have weights for it, and turned.

    Args:
        rows: [N, dim of all heads and of what follows] as a layer's matrix made them, queries first.
        heads, kv_heads: How many of each.
        cos, sin: [N, 1, dim / 2].
        norms: [dim] of queries, and of keys.
        eps: Of the norms.
    """
    rows, half, every = _dense(rows), cos.shape[-1], heads + kv_heads
    found = rows.new_empty(len(rows), every, 2 * half)
    of_queries, of_keys = norms or (rows, rows)
    with torch.cuda.device_of(rows):
        _turn[len(rows), every](
            rows, cos.contiguous(), sin.contiguous(), of_queries, of_keys, found, rows.stride(0), heads, eps,
            ALL=every, HALF=half, WIDE=triton.next_power_of_2(half), NORMED=norms is not None, num_warps=1,
        )  # fmt: skip
    return found


def gate(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """[N, inner] activated gates times what they open, of rows [N, 2 inner] that have the gates first."""
    rows, inner = _dense(rows), rows.shape[1] // 2
    found = rows.new_empty(len(rows), inner)
    with torch.cuda.device_of(rows):
        _gate[len(rows), triton.cdiv(inner, _BLOCK)](
            rows, found, inner, rows.stride(0), KIND=GATES[kind], BLOCK=_BLOCK,
        )  # fmt: skip
    return found


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
