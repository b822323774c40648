"""One level for each part of a model, all of them together within a budget, at the lowest price."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from decodery.core.errors import SettingsError

_CELLS = 1 << 17


def cheapest(prices: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The level of every part with which the sum of prices is lowest and that of sizes at most `budget`.

    The integer program is solved by dynamic programming over what is spent, in steps of the largest number that divides
    all sizes, and in 131,072 steps where these would be more: sizes are then rounded up, so that the budget is kept all
    the same.

    Args:
        prices, sizes: Of every part at each of its levels; sizes are integers above 0.

    Raises:
        SettingsError: If not even the smallest levels fit.
    """
    step = max(math.gcd(*(size for row in sizes for size in row)), -(-budget // _CELLS))
    room = budget // step
    spent = [[-(-size // step) for size in row] for row in sizes]
    if sum(map(min, spent)) > room:
        least = sum(map(min, sizes))
        raise SettingsError(f"a budget of {budget:,} bits is too small: the least that these layers take is {least:,}")
    totals = np.zeros(room + 1)
    taken = []
    for row, widths in zip(prices, spent, strict=True):
        best, choice = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int16)
        for level, (price, width) in enumerate(zip(row, widths, strict=True)):
            if width > room:
                continue
            reached = totals[: room + 1 - width] + price
            better = reached < best[width:]
            best[width:][better] = reached[better]
            choice[width:][better] = level
        totals = best
        taken.append(choice)
    found, left = [], room
    for choice, widths in zip(reversed(taken), reversed(spent), strict=True):
        found.append(int(choice[left]))
        left -= widths[found[-1]]
    return found[::-1]
