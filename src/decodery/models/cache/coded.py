"""Rows of numbers in bytes with a scale after each: what caches may hold.

Integers are written and read by csrc/coded.h as here. Numbers of E4M3 (`FLOATS`) are for devices; their scales are
powers of two, so that no number is rounded twice.
"""

from __future__ import annotations

import torch

DTYPE = torch.int8
FLOATS = torch.uint8
"""What bytes of E4M3 are held as: PyTorch moves few types of so few bits."""
SCALE = torch.bfloat16.itemsize
"""Elements after a row's numbers, which are the scale's bytes."""
MOST = 127
QUERY_MOST = 8191
"""The largest integer of a query: sums of `WIDEST` products fit 32 bits."""
WEIGHT_MOST = 16383
"""The largest integer of a weight."""
WEIGHT_STEP = 128
"""Integers are split into multiples of this and what is left, as two bytes hold them."""
MOST_FLOAT = 448
"""The largest number of E4M3."""
WIDEST = 1024
_NOTHING = 1e-30


def row_bytes(dim: int, dtype: torch.dtype) -> int:
    """Of a cache's row of `dim` numbers that is kept in `dtype`."""
    return (dim + beside(dtype)) * dtype.itemsize


def beside(dtype: torch.dtype) -> int:
    """Elements after a row's numbers, which are kept in `dtype`."""
    return SCALE if dtype in (DTYPE, FLOATS) else 0


def encode(rows: torch.Tensor, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """[..., dim] floats -> [..., dim + SCALE] bytes: steps of a row's largest over `MOST`, or `FLOATS`.

    What `decode` makes of integers is encoded as the same bytes. A row with a number that is not finite is none.
    """
    rows = rows.float()
    largest = rows.abs().amax(dim=-1, keepdim=True)
    if dtype == FLOATS:
        return _floats(rows, largest)
    scale = torch.where(largest < _NOTHING, 0.0, largest / MOST).to(torch.bfloat16)
    scale[~largest.isfinite()] = torch.nan
    usable = scale > 0
    inverse = torch.where(usable, 1.0 / scale.float(), 0.0)
    numbers = (torch.where(usable, rows, 0.0) * inverse).round().clamp(-MOST, MOST)
    return torch.cat((numbers.to(DTYPE), scale.view(DTYPE)), dim=-1)


def _floats(rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The same as numbers of E4M3 times the least power of two that leaves none above `MOST_FLOAT`."""
    fraction, exponent = torch.frexp(largest / MOST_FLOAT)
    scale = torch.exp2((exponent - (fraction == 0.5).int()).float())
    scale = torch.where(largest < _NOTHING, 0.0, scale).to(torch.bfloat16)
    scale[~largest.isfinite()] = torch.nan
    usable = scale > 0
    numbers = torch.where(usable, rows, 0.0) * torch.where(usable, 1.0 / scale.float(), 0.0)
    return torch.cat((numbers.to(torch.float8_e4m3fn).view(FLOATS), scale.view(FLOATS)), dim=-1)


def decode(coded: torch.Tensor) -> torch.Tensor:
    """[..., dim + SCALE] bytes -> [..., dim] float32."""
    numbers, scale = apart(coded)
    if numbers.dtype == FLOATS:
        numbers = numbers.contiguous().view(torch.float8_e4m3fn)
    return numbers.float() * scale


def apart(coded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., dim + SCALE] bytes -> numbers [..., dim], bytes still, and scales [..., 1] float32."""
    scale = coded[..., -SCALE:].contiguous().view(torch.bfloat16).float()
    return coded[..., :-SCALE], scale


def products(queries: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
    """queries [..., dim] times coded keys [..., dim + SCALE] in integers, over the last dimension: [...]."""
    numbers, scale = apart(coded)
    largest = queries.abs().amax(dim=-1, keepdim=True)
    # Python's number over a tensor would be that number times the tensor's inverse, which is rounded twice.
    inverse = torch.where(largest < _NOTHING, 0.0, torch.full_like(largest, QUERY_MOST) / largest)
    whole = (queries * inverse).round().clamp(-QUERY_MOST, QUERY_MOST)
    # Integers below 2^53, so that no order of the sum changes it.
    sums = (whole.double() * numbers.double()).sum(dim=-1).float()
    return sums * (largest / QUERY_MOST * scale)[..., 0]


def weighted_sums(weights: torch.Tensor, coded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """weights [..., n] of coded values [..., n, dim + SCALE], added up in integers: [..., dim].

    Args:
        hidden: [..., n], whose weights are 0 whatever their values are.
    """
    numbers, scale = apart(coded)
    exact = (weights * scale[..., 0]).masked_fill(hidden, 0.0)
    largest = exact.amax(dim=-1, keepdim=True)
    inverse = torch.where(largest < _NOTHING, 0.0, torch.full_like(largest, WEIGHT_MOST) / largest)
    whole = (exact * inverse).clamp(max=WEIGHT_MOST).round()
    high = (whole / WEIGHT_STEP).floor()
    # Integers below 2^53, so that no order of a sum changes it.
    split = torch.stack((high, whole - high * WEIGHT_STEP), dim=-2).double()
    upper, lower = (split @ numbers.double()).float().unbind(dim=-2)
    return (upper * WEIGHT_STEP + lower) * (largest / WEIGHT_MOST)
