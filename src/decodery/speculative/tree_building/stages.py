"""Families of trees for drafters that guess inside of the target's own pass: one tree for every number of guesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

_ROUNDS = 20
"""How often values and trees are worked out from each other at most; a few times are enough."""
_LENGTHS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)
SHORTEST, LONGEST = 4, 64
"""Rows that a pass needs, for one guess and one token that was guessed, and those it may have."""


@dataclass(frozen=True, eq=False)
class StageTree:
    """The tree of a pass before which so many tokens ahead were guessed.

    Node 0 is the root; parents come first.

    Attributes:
        parents, ranks, depths: [n], rank r at depth d being the r-th best guess of the d-th token.
        chances: [n], that the accepted path leads through a node.
        lasts: [n], that it ends there.
        asks: [n] how many tokens are to be guessed after each node.
    """

    parents: np.ndarray
    ranks: np.ndarray
    depths: np.ndarray
    chances: np.ndarray
    lasts: np.ndarray
    asks: np.ndarray

    @property
    def rows(self) -> int:
        """What the pass reads."""
        return len(self.parents) + int(self.asks.sum())

    @property
    def accepted(self) -> float:
        """Tokens of the tree that are accepted, on average."""
        return float(self.chances[1:].sum())


@dataclass(frozen=True, eq=False)
class Stages:
    """The trees for 1, 2, ... guessed tokens.

    A pass with tree m is followed by one with tree asks[v], v being the last node that was accepted.

    Attributes:
        share: [stages] how often each is used in the long run.
        tokens: What a pass emits then, on average.
    """

    trees: tuple[StageTree, ...]
    share: np.ndarray
    tokens: float

    def seconds(self, of_rows: Callable[[np.ndarray], np.ndarray]) -> float:
        """Time of a pass in the long run.

        Args:
            of_rows: [k] numbers of rows -> [k] their times.
        """
        return float(self.share @ of_rows(np.array([tree.rows for tree in self.trees])))


def most_likely(rates: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parents, ranks, depths and probabilities [n + 1] of the root and the most likely nodes below.

    At most `nodes` of them. A place's chance is their product along its path. Places come in the order of their
    chances, so that any beginning is a tree.

    Args:
        rates: [depths, ranks], falling along the ranks: how often the guess of a rank is right at a depth.
    """
    found = [(-1, -1, 0, 1.0)]
    heap = [(-float(rates[0, 0]), 0, 0)]
    while heap and len(found) <= nodes:
        negative, parent, rank = heappop(heap)
        _, _, above, chance = found[parent]
        found.append((parent, rank, above + 1, -negative))
        if rank + 1 < rates.shape[1]:
            heappush(heap, (-chance * float(rates[above, rank + 1]), parent, rank + 1))
        if above + 1 < len(rates):
            heappush(heap, (negative * float(rates[above + 1, 0]), len(found) - 1, 0))
    parents, ranks, depths, chances = zip(*found, strict=True)
    return np.array(parents), np.array(ranks), np.array(depths), np.array(chances)


def spread(lasts: np.ndarray, gains: np.ndarray, room: int) -> np.ndarray:
    """How many tokens to predict after each node: [n] from 1 to len(gains) + 1, up to `room` in total.

    All have all guesses, until those are taken away that are worth least: chance times gain.

    Args:
        lasts: [n] chances that a node is the last one accepted.
        gains: What a second, third, ... guess is worth there, falling.
    """
    worth = np.outer(lasts, gains)
    kept = np.argsort(-worth, axis=None, kind="stable")[: max(room - len(lasts), 0)]
    return 1 + np.bincount(kept // max(len(gains), 1), minlength=len(lasts))


def find_stages(rates: np.ndarray, length: int) -> Stages | None:
    """The trees whose passes read at most `length` rows and emit most tokens in the long run.

    None where none fits. Where the last ones are not worth their rows, fewer are guessed.

    Args:
        rates: See `most_likely`; a row for every token ahead that can be guessed.
    """
    return _find(rates.tobytes(), rates.shape, length)


def fastest_stages(rates: np.ndarray, of_rows: Callable[[np.ndarray], np.ndarray], longest: int) -> Stages | None:
    """The trees that emit most tokens per second in passes of at most `longest` rows.

    None where passes of one row do.

    Args:
        of_rows: See `Stages.seconds`.
    """
    best, fastest = None, 1.0 / float(of_rows(np.array([1]))[0])
    for length in _LENGTHS:
        found = find_stages(rates, length) if length <= longest else None
        if found is not None and (speed := found.tokens / found.seconds(of_rows)) > fastest:
            best, fastest = found, speed
    return best


@lru_cache(maxsize=256)
def _find(data: bytes, shape: tuple[int, int], length: int) -> Stages | None:
    rates = np.frombuffer(data).reshape(shape)
    every = [_search(rates[:ahead], length) for ahead in range(1, len(rates) + 1) if length >= ahead + 3]
    return max(every, key=lambda each: each.tokens, default=None)


def _search(rates: np.ndarray, length: int) -> Stages:
    """The best trees within `length` rows.

    The published search is over all sizes, and a guess is worth how much more the tree that it allows accepts. Here the
    search begins with that value; then a guess is worth its long-run value under the trees found last, which a few
    rounds settle (policy iteration).
    """
    ahead = len(rates)
    most = (length - 1 - ahead) // 2
    places = [most_likely(rates[:depth], most) for depth in range(1, ahead + 1)]
    values = np.array([float(chances[1:].sum()) for *_, chances in places])
    best: Stages | None = None
    for _ in range(_ROUNDS):
        gains = np.minimum.accumulate(np.maximum(np.diff(values), 0.0))
        trees = tuple(_tree(found, values, gains, length) for found in places)
        stages, values = _long_run(trees)
        if best is not None and stages.tokens <= best.tokens + 1e-9:
            break
        best = stages
    assert best is not None
    return best


def _tree(
    places: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], values: np.ndarray, gains: np.ndarray, length: int
) -> StageTree:
    """The tree of the first places, however many are best, that leads to most, `values` being those of what follows."""
    ahead, best, most = len(values), None, -np.inf
    for nodes in range(1, len(places[0])):
        parents, ranks, depths, chances = (each[: nodes + 1] for each in places)
        lasts = chances - np.bincount(parents[1:], chances[1:], minlength=nodes + 1)
        asks = np.concatenate(([ahead], spread(lasts[1:], gains, length - 1 - ahead - nodes)))
        worth = float(chances[1:].sum() + lasts @ values[asks - 1])
        if worth > most:
            best, most = StageTree(parents, ranks, depths, chances, lasts, asks), worth
    assert best is not None
    return best


def _long_run(trees: tuple[StageTree, ...]) -> tuple[Stages, np.ndarray]:
    """How the trees do in the long run, and [stages] what it is worth to begin with each, in tokens."""
    n = len(trees)
    steps = np.stack([np.bincount(tree.asks - 1, tree.lasts, minlength=n) for tree in trees])
    accepted = np.array([tree.accepted for tree in trees])
    # The shares stay as they are from pass to pass and sum to 1: one of the equations is said by the others.
    equations = np.vstack((np.eye(n) - steps.T, np.ones(n)))
    share = np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]
    mean = float(share @ accepted)
    values = np.linalg.lstsq(np.eye(n) - steps, accepted - mean, rcond=None)[0]
    return Stages(trees, share, 1.0 + mean), values - values[0]
