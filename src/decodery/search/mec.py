"""Couplings with little entropy, and maps that keep as much information as a rate allows.

Minimum-Entropy Couplings and Their Applications (2019) for the greedy coupling; Minimum Entropy Coupling with
Bottleneck (2024) for the map. All of it is plain float64 arithmetic in a fixed order: two sides that begin with the
same numbers end with the same.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

_DUST = 1e-15
"""Mass that only rounding can have left over."""


def entropy(p: np.ndarray) -> float:
    """Bits of a distribution [n]."""
    positive = p[p > 0]
    return float(-(positive * np.log2(positive)).sum())


def couple(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """A joint distribution [n, m] float64 of low entropy whose marginals are p [n] and q [m].

    Greedily puts the two largest masses left together; ties go to the lower index. Its entropy is at most one bit above
    the least possible, and at most n + m - 1 entries are positive.
    """
    joint = np.zeros((len(p), len(q)))
    rows = [(-mass, i) for i, mass in enumerate(p.tolist()) if mass > 0]
    columns = [(-mass, j) for j, mass in enumerate(q.tolist()) if mass > 0]
    heapify(rows)
    heapify(columns)
    while rows and columns:
        (row, i), (column, j) = heappop(rows), heappop(columns)
        mass = min(-row, -column)
        joint[i, j] += mass
        if -row - mass > _DUST:
            heappush(rows, (row + mass, i))
        if -column - mass > _DUST:
            heappush(columns, (column + mass, j))
    return joint


def bottleneck(p: np.ndarray, rate: float) -> np.ndarray:
    """A map [n] int64 of values of p [n] to labels of entropy at most, and close to, `rate` bits.

    Merges the two largest cells until merging the two smallest is enough. The information kept is within h(p2) bits of
    what any map keeps, h being the binary entropy and p2 the second largest probability.
    """
    order = np.argsort(-p, kind="stable")
    cells = p[order]
    count = int((cells > 0).sum())
    left = entropy(p)
    # Cells 0 to `merged` are one, the largest; values without mass join it.
    merged, mass = 0, float(cells[0])
    pair = False
    while left > rate + 1e-9 and merged < count - 1:
        small, smaller = (mass if merged == count - 2 else float(cells[count - 2])), float(cells[count - 1])
        if left - _lost(small, smaller) <= rate + 1e-9:
            pair = True
            break
        left -= _lost(mass, float(cells[merged + 1]))
        merged += 1
        mass += float(cells[merged])
    ranks = np.maximum(np.arange(len(p)) - merged, 0)
    ranks[count:] = 0
    if pair:
        ranks[count - 1] = ranks[count - 2]
    labels = np.empty(len(p), dtype=np.int64)
    labels[order] = ranks
    return labels


def _lost(a: float, b: float) -> float:
    """Bits of entropy that go when two cells become one."""
    return a * np.log2(1 + b / a) + b * np.log2(1 + a / b)
