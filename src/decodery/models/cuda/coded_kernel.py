"""Rows of bytes with a scale, inside of Triton kernels: what `cache.coded` writes and reads, without types of 8 bits.

CODED is 1 for integers and 2 for numbers of E4M3. Scales are the upper halves of float32 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEAREST = tl.constexpr(12582912.0)
"""What is added to it has no place after the point: 1.5 * 2^23."""
_NOTHING = tl.constexpr(1e-30)


@triton.jit
def encoded(row, CODED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of a row of numbers, and the 16 bits of their scale."""
    row = row.to(tl.float32)
    largest = tl.max(tl.abs(row), axis=0)
    bits = largest.to(tl.int32, bitcast=True)
    # The largest of some numbers takes no notice of what is none.
    tiny, finite = largest < _NOTHING, (bits < 0x7F800000) & (tl.max((row != row).to(tl.int32), axis=0) == 0)
    if CODED == 1:
        # The scale is the nearest number of 16 bits.
        near = (largest / 127.0).to(tl.int32, bitcast=True)
        half = (near + 0x7FFF + ((near >> 16) & 1)) >> 16
        scale = (half << 16).to(tl.float32, bitcast=True)
        steps = row * (1.0 / tl.where(tiny | (finite == 0), 1.0, scale))
        whole = (steps + _NEAREST) - _NEAREST
        codes = tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int32)
    else:
        # The least power of two that leaves none above 448, which is 1.75 * 2^8.
        exponent = ((bits + 0x1FFFFF) >> 23) - 8
        half = exponent << 7
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        steps = tl.abs(row) * tl.where(tiny | (finite == 0), 0.0, inverse)
        form = steps.to(tl.int32, bitcast=True)
        normal = ((form + 0x7FFFF + ((form >> 20) & 1)) >> 20) - (120 << 3)
        small = ((steps * 512.0 + _NEAREST) - _NEAREST).to(tl.int32)
        codes = tl.where(steps < 0.015625, small, normal) | tl.where(row < 0.0, 128, 0)
    usable = finite & (tiny == 0)
    # Of a row with a number that is none the scale is none.
    half = tl.where(usable, half, tl.where(finite, 0, 0x7FC0))
    return tl.where(usable, codes, 0), half


@triton.jit
def numbers(codes, CODED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What codes stand for before their scale, float32; numbers of 16 bits hold them all."""
    if CODED == 1:
        return codes.to(tl.float32)
    code = codes.to(tl.int32)
    exponent, fraction = (code >> 3) & 15, code & 7
    normal = (((code & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
    return tl.where(code > 127, -size, size)


@triton.jit
def scales(halves):  # type: ignore[no-untyped-def]
    """Scales float32 by their 16 bits."""
    return (halves.to(tl.int32) << 16).to(tl.float32, bitcast=True)
