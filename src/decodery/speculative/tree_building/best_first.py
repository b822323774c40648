"""Trees and chains grown towards what followed most often."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

import numpy as np

from decodery.step.draft_tree import DraftTree

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True)
class Grown:
    """A tree that was grown best first.

    Attributes:
        tokens, parents: Of a tree's nodes, the root left out (parent -1).
        score: The sum of their probabilities.
    """

    tokens: list[int]
    parents: list[int]
    score: float

    def tree(self, last_token: int) -> DraftTree:
        return DraftTree(np.array([last_token, *self.tokens]), np.array([-1, *(parent + 1 for parent in self.parents)]))


def grow(
    root: Place,
    count: Callable[[Place], int],
    following: Callable[[Place], list[tuple[int, Place]]],
    *,
    nodes: int,
    depth: int,
    least: float,
    branch: bool,
) -> Grown:
    """Up to `nodes` nodes below a place, most likely first, of path probability `least` or more.

    A step's probability is the count after it by the count before it. Equally likely nodes come in the order they were
    found in.

    Args:
        branch: A tree; otherwise a chain of the most likely steps.
    """
    tokens: list[int] = []
    parents: list[int] = []
    score = 0.0
    heap: list[tuple[float, int, int, int, int, Place]] = []
    found = 0

    def open_below(place: Place, node: int, chance: float, level: int) -> None:
        nonlocal found
        if level > depth:
            return
        steps = following(place)
        share = chance / count(place) if steps else 0.0
        if not branch and len(steps) > 1:
            steps = [max(steps, key=lambda step: count(step[1]))]
        for token, after in steps:
            value = share * count(after)
            if value >= least:
                heappush(heap, (-value, found, token, node, level, after))
                found += 1

    open_below(root, -1, 1.0, 1)
    while heap and len(tokens) < nodes:
        value, _, token, parent, level, place = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        score -= value
        open_below(place, len(tokens) - 1, -value, level + 1)
    return Grown(tokens, parents, score)
