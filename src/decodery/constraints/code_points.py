"""Sets of characters, as ranges of code points."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache

LAST = 0x10FFFF
_LAST_CASED = 0x1EFFF
"""No letter beyond has more than one case."""
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive ranges of code points."""


def union(*ranges: Ranges) -> Ranges:
    """The characters that are in any of these; surrogates are none."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(each for some in ranges for each in some):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """The characters that are in none of these."""
    found, start = [], 0
    for low, high in (*union(ranges, (_SURROGATES,)), (LAST + 1, LAST + 1)):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return tuple(found)


def code_points(text: str) -> Ranges:
    """The characters of a text."""
    return union(tuple((ord(char), ord(char)) for char in text))


DIGIT: Ranges = ((0x30, 0x39),)
WORD = union(DIGIT, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
SPACE = union(code_points("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),))
ANY = complement(code_points("\n\r\u2028\u2029"))


@lru_cache(maxsize=1)
def _variants() -> tuple[list[int], list[Ranges]]:
    """Letters with more than one case, in order, and what each stands for where case does not count."""
    alike: dict[str, list[int]] = {}
    for code in range(_LAST_CASED + 1):
        folded = chr(code).casefold()
        if len(folded) == 1:
            alike.setdefault(folded, []).append(code)
    found = {
        code: code_points("".join(map(chr, codes))) for codes in alike.values() if len(codes) > 1 for code in codes
    }
    return sorted(found), [found[code] for code in sorted(found)]


def any_case(low: int, high: int) -> Ranges:
    """The characters from `low` to `high`, in any case: simple case folding."""
    codes, variants = _variants()
    return union(((low, high),), *variants[bisect_left(codes, low) : bisect_right(codes, high)])
