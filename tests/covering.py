"""Few rows of a matrix that stand for all of it: every pair of values that occurs together does so in one of them."""

from __future__ import annotations

import heapq
import os
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])

FULL = os.environ.get("DECODERY_MATRIX") == "full"
"""Whether all rows run, as in `make test-all`."""


def covering(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """Some of `rows`, in their order, that hold every combination of `strength` of their columns' values; or all of
    them if FULL.

    Each time the row is taken that has most that is new, the first one among equals: the same rows in every process.
    """
    return list(rows) if FULL else greedy_cover(rows, strength)


def in_turn(names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Every name with one of the others, which take turns; with all of them if FULL."""
    return [
        (name, other) for at, name in enumerate(names) for other in (others if FULL else [others[at % len(others)]])
    ]


def greedy_cover(rows: Sequence[Row], strength: int) -> list[Row]:
    held = [set(combinations(enumerate(row), strength)) for row in rows]
    missing = set().union(*held)
    # What a row brings only ever falls, so a row whose count is up to date and on top is the best.
    heap = [(-len(parts), number) for number, parts in enumerate(held)]
    heapq.heapify(heap)
    taken = []
    while missing:
        _, number = heap[0]
        fresh = len(held[number] & missing)
        heapq.heapreplace(heap, (-fresh, number))
        if heap[0] == (-fresh, number):
            heapq.heappop(heap)
            missing -= held[number]
            taken.append(number)
    return [rows[number] for number in sorted(taken)]
