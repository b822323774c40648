"""Few rows of a matrix that stand for all of it: every pair of values that occurs together does so in one of them."""

from __future__ import annotations

import heapq
import os
from collections.abc import Hashable, Sequence
from datetime import date
from itertools import combinations
from random import Random
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Name = TypeVar("Name")
Other = TypeVar("Other")

DEEP = os.environ.get("DECODERY_MATRIX") == "deep"
"""Whether texts are longer and draws are more, as in `make soak`."""
FULL = DEEP or os.environ.get("DECODERY_MATRIX") == "full"
"""Whether all rows run, as in `make test-matrix`."""
FEW = os.environ.get("DECODERY_MATRIX") == "few"
"""Whether few rows stand for a matrix, as in `make test`. Without any of these, more do, as in `make test-all`."""
SEED = int(os.environ.setdefault("DECODERY_SEED", str(date.today().toordinal())))
"""Decides which rows stand for a matrix: others every day. In the environment, so that all processes take the same."""


def covering(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """Some of `rows`, in their order, that hold every combination of `strength` of their columns' values if FEW.

    Otherwise those of one column more; all rows if FULL.
    """
    return list(rows) if FULL else greedy_cover(rows, min(strength + (not FEW), len(rows[0])), SEED)


def in_turn(names: Sequence[Name], others: Sequence[Other]) -> list[tuple[Name, Other]]:
    """Every name with one of the others, which take turns, if FEW; otherwise with two, or with all if FULL."""
    count = len(others) if FULL else min(2 - FEW, len(others))
    return [
        (name, others[(at * count + more) % len(others)])
        for at, name in enumerate(names, SEED)
        for more in range(count)
    ]


def some(names: Sequence[Name], count: int) -> list[Name]:
    """As many of the names if FEW, other ones for every SEED; otherwise twice as many, or all if FULL."""
    return list(names) if FULL else Random(SEED).sample(list(names), min(count * (2 - FEW), len(names)))


def greedy_cover(rows: Sequence[Row], strength: int, seed: int = 0) -> list[Row]:
    """Each time the row is taken that has most that is new; the seed decides among equals."""
    order = Random(seed).sample(range(len(rows)), len(rows))
    held = [set(combinations(enumerate(rows[number]), strength)) for number in order]
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
    return [rows[number] for number in sorted(order[place] for place in taken)]
