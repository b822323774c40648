"""The 4-bit blocks of GGUF files in the form of `Int4Linear`: the same whole numbers, in another order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of n rows: numbers [n, in / 2] uint8, the even input in the low half; step and least [n, in / 32] float16."""

_SUPER = 144
"""Bytes of a Q4_K block: two scales, 12 bytes of 6-bit steps and least values for 8 blocks of 32, and the numbers."""


def q4_0(raw: np.ndarray) -> Blocks:
    """step * (number - 8). raw: [n, bytes of a row] uint8."""
    blocks = raw.reshape(len(raw), -1, 18)
    step = _halves(blocks[..., :2])[..., 0]
    return _apart(blocks[..., 2:]), step, step * np.float16(-8)


def q4_1(raw: np.ndarray) -> Blocks:
    """step * number + least."""
    blocks = raw.reshape(len(raw), -1, 20)
    scales = _halves(blocks[..., :4])
    return _apart(blocks[..., 4:]), scales[..., 0], scales[..., 1]


def q4_k(raw: np.ndarray) -> Blocks:
    """Steps and least values are 6-bit numbers times scales of 256 inputs; their products are rounded to halves."""
    blocks = raw.reshape(len(raw), -1, _SUPER)
    scales = _halves(blocks[..., :4]).astype(np.float32)
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    # Blocks 0-3 have six bits in one byte each; those of 4-7 have four there and two at the top of the others'.
    steps = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    leasts = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    step, least = scales[..., :1] * steps, -scales[..., 1:] * leasts
    # 32 bytes hold the low halves of one block's numbers and the high halves of the next one's.
    numbers = blocks[..., 16:].reshape(len(raw), -1, 32)
    even, odd = numbers[..., 0::2], numbers[..., 1::2]
    packed = np.stack((even & 15 | odd << 4, even >> 4 | odd & 240), axis=-2)
    n = len(raw)
    return packed.reshape(n, -1), step.reshape(n, -1).astype(np.float16), least.reshape(n, -1).astype(np.float16)


READ: dict[str, Callable[[np.ndarray], Blocks]] = {"Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k}
"""By the name of the GGML type."""


def _halves(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16)


def _apart(raw: np.ndarray) -> np.ndarray:
    """From blocks of 16 bytes whose halves lie 16 inputs apart, to neighbours in one byte, [n, in / 2]."""
    even, odd = raw[..., 0::2], raw[..., 1::2]
    return np.concatenate((even & 15 | odd << 4, even >> 4 | odd & 240), axis=-1).reshape(len(raw), -1)
