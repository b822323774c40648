"""The blocks of GGUF files as layers have them: the same integers, in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from decodery.core.native.kernels import Form

from ..native.packed import BITS

Blocks = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of n rows: numbers [n, in * bits / 8] uint8, as `BlockLinear` has them; both scales [n, in / 32] float16, of MXFP4
exponents, or of super-blocks scales and integers as `SuperBlockLinear` has them."""


class Reader(NamedTuple):
    """What a type's blocks become.

    Attributes:
        read: From rows [n, bytes of a row] uint8.
    """

    form: Form
    read: Callable[[np.ndarray], Blocks]


def q4_0(raw: np.ndarray) -> Blocks:
    """step * (number - 8)."""
    blocks = raw.reshape(len(raw), -1, 18)
    step = _halves(blocks[..., :2])[..., 0]
    return _apart(blocks[..., 2:]), step, step * np.float16(-8)


def q4_1(raw: np.ndarray) -> Blocks:
    """step * number + least."""
    blocks = raw.reshape(len(raw), -1, 20)
    scales = _halves(blocks[..., :4])
    return _apart(blocks[..., 4:]), scales[..., 0], scales[..., 1]


def q4_k(raw: np.ndarray) -> Blocks:
    """Steps and least values are 6-bit integers times scales of 256 inputs."""
    blocks = raw.reshape(len(raw), -1, 144)
    # 32 bytes hold the low halves of one block's numbers and the high halves of the next one's.
    numbers = blocks[..., 16:].reshape(len(raw), -1, 32)
    even, odd = numbers[..., 0::2], numbers[..., 1::2]
    packed = np.stack((even & 15 | odd << 4, even >> 4 | odd & 240), axis=-2)
    return packed.reshape(len(raw), -1), *_six_bits(blocks)


def q5_0(raw: np.ndarray) -> Blocks:
    """step * (number - 16)."""
    blocks = raw.reshape(len(raw), -1, 22)
    step = _halves(blocks[..., :2])[..., 0]
    return _fifths(blocks[..., 2:6], blocks[..., 6:]), step, step * np.float16(-16)


def q5_1(raw: np.ndarray) -> Blocks:
    """step * number + least."""
    blocks = raw.reshape(len(raw), -1, 24)
    scales = _halves(blocks[..., :4])
    return _fifths(blocks[..., 4:8], blocks[..., 8:]), scales[..., 0], scales[..., 1]


def q5_k(raw: np.ndarray) -> Blocks:
    """As Q4_K, with a fifth bit: bit b of 32 bytes is that of block b."""
    blocks = raw.reshape(len(raw), -1, 176)
    low = blocks[..., 48:].reshape(len(raw), -1, 4, 1, 32)
    low = np.concatenate((low & 15, low >> 4), axis=-2).reshape(len(raw), -1, 8, 32)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return planes(low | fifth << 4, 5), *_six_bits(blocks)


def q6_k(raw: np.ndarray) -> Blocks:
    """step * (number - 32); steps are 8-bit integers times a scale of 256 inputs."""
    blocks = raw.reshape(len(raw), -1, 210)
    # 64 bytes hold the low bits of 128 numbers, 32 bytes the others.
    low = blocks[..., :128].reshape(len(raw), -1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=-2).reshape(len(raw), -1, 2, 4, 32)
    high = blocks[..., 128:192].reshape(len(raw), -1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    integers = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(raw), -1, 2)
    return planes(low | high << 4, 6), _halves(blocks[..., 208:]), integers


def q8_0(raw: np.ndarray) -> Blocks:
    """step * (number - 128)."""
    blocks = raw.reshape(len(raw), -1, 34)
    step = _halves(blocks[..., :2])[..., 0]
    return (blocks[..., 2:] ^ 128).reshape(len(raw), -1), step, step


def iq4_nl(raw: np.ndarray) -> Blocks:
    """step * table[number]."""
    blocks = raw.reshape(len(raw), -1, 18)
    step = _halves(blocks[..., :2])[..., 0]
    return _apart(blocks[..., 2:]), step, step


def iq4_xs(raw: np.ndarray) -> Blocks:
    """The same with steps that are 6-bit integers, less 32, times a scale of 256 inputs."""
    blocks = raw.reshape(len(raw), -1, 136)
    places = np.arange(8, dtype=np.uint16)
    low = np.repeat(blocks[..., 4:8], 2, axis=-1) >> (places % 2 * 4).astype(np.uint8) & 15
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> places * 2 & 3
    integers = ((low | high << 4).astype(np.int8) - np.int8(32)).reshape(len(raw), -1, 1).repeat(2, axis=-1)
    return _apart(blocks[..., 8:].reshape(len(raw), -1, 16)), _halves(blocks[..., :2]), integers


def mxfp4(raw: np.ndarray) -> Blocks:
    """2^(exponent - 127) * what the code of E2M1 stands for."""
    blocks = raw.reshape(len(raw), -1, 17)
    exponents = np.ascontiguousarray(blocks[..., 0])
    return _apart(blocks[..., 1:]), exponents, exponents


READ = {
    "Q4_0": Reader(Form.BLOCKS4, q4_0),
    "Q4_1": Reader(Form.BLOCKS4, q4_1),
    "Q4_K": Reader(Form.SUPER4, q4_k),
    "IQ4_NL": Reader(Form.TABLE4, iq4_nl),
    "IQ4_XS": Reader(Form.SUPER_TABLE4, iq4_xs),
    "Q5_0": Reader(Form.BLOCKS5, q5_0),
    "Q5_1": Reader(Form.BLOCKS5, q5_1),
    "Q5_K": Reader(Form.SUPER5, q5_k),
    "Q6_K": Reader(Form.SUPER6, q6_k),
    "Q8_0": Reader(Form.BLOCKS8, q8_0),
    "MXFP4": Reader(Form.MXFP4, mxfp4),
}
"""By the name of the GGML type."""
NUMBERS = {
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
    **{"IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39},
}  # fmt: skip
"""What GGML and `Blocks` of csrc/abi.h number them by."""
SIZES = {
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136)},
    "MXFP4": (32, 17),
}
"""How many numbers share scales, and the bytes of these."""
FOUR_BITS = [kind for kind, (form, _) in READ.items() if BITS[form] == 4]


def _halves(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16)


def _six_bits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and integers of Q4_K and Q5_K: two scales and 12 bytes of 6-bit integers come first."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    # Blocks 0-3 have six bits in one byte each; those of 4-7 have four there and two at the top of the others'.
    steps = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    leasts = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return _halves(blocks[..., :4]), np.stack((steps, leasts), axis=-1).reshape(len(blocks), -1, 2)


def _apart(raw: np.ndarray) -> np.ndarray:
    """From blocks of 16 bytes whose halves lie 16 inputs apart, to neighbours in one byte, [n, in / 2]."""
    even, odd = raw[..., 0::2], raw[..., 1::2]
    return np.concatenate((even & 15 | odd << 4, even >> 4 | odd & 240), axis=-1).reshape(len(raw), -1)


def _fifths(bits: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Numbers of Q5_0 and Q5_1: the fifth bits of 32 inputs in 4 bytes, the others as in Q4_0; [n, in * 5 / 8]."""
    # The fifth bits are in the order of the inputs already.
    return np.concatenate((_apart(low), bits.reshape(len(low), -1)), axis=-1)


def planes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [n, ...] of 5 or 6 bits, a byte each in the order of the inputs -> [n, in * bits / 8]."""
    numbers = numbers.reshape(len(numbers), -1)
    low, high = numbers & 15, numbers >> 4
    low = low[:, 0::2] | low[:, 1::2] << 4
    if bits == 5:
        return np.concatenate((low, np.packbits(high, axis=-1, bitorder="little")), axis=-1)
    return np.concatenate((low, high[:, 0::4] | high[:, 1::4] << 2 | high[:, 2::4] << 4 | high[:, 3::4] << 6), axis=-1)
