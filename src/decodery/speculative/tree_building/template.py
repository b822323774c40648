"""Static trees of ranks: which of a node's successors, counted by rank, become its children."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from decodery.core.errors import SettingsError
from decodery.step.draft_length_policy import LARGEST, Budget
from decodery.step.draft_tree import DraftTree, Origin
from decodery.step.look_ahead import Level

from .stages import most_likely

Children = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Successors [m, width] int of `nodes` [m], best first, -1 for none, given the tokens [n] filled in so far."""

MOST = LARGEST
"""Places a shape may have: as many as a request may allow."""

_WEIGHT = 32.0


class RankRates:
    """How often the successor of each rank was the right one: what a place in a template is worth.

    Until it is measured, rank r counts as right once in (r + 1)(r + 2) times; this prior weighs as much as 32
    observations. Memory: one number per rank.
    """

    def __init__(self, width: int) -> None:
        ranks = np.arange(width)
        self._hits = _WEIGHT / ((ranks + 1.0) * (ranks + 2.0))
        self._seen = _WEIGHT

    def learn(self, ranks: np.ndarray) -> None:
        """Count at which rank the tokens came.

        Args:
            ranks: [m] of the tokens that came, len(rates) for those at no rank.
        """
        self._hits += np.bincount(ranks, minlength=len(self._hits) + 1)[: len(self._hits)]
        self._seen += len(ranks)

    @property
    def rates(self) -> np.ndarray:
        """[width] float64, all within (0, 1)."""
        return self._hits / self._seen


class Template:
    """A tree of rank paths.

    Node 0 is the root; nodes stand level by level, siblings by rank.

    Args:
        counts: How many children the node at each rank path has; paths that are not there have none.
        parents, ranks, depths: [n] of all nodes, the root included.
    """

    def __init__(self, counts: Mapping[tuple[int, ...], int]) -> None:
        paths: list[tuple[int, ...]] = [()]
        parents, ranks = [-1], [-1]
        for node, path in enumerate(paths):  # grows while it is walked: a breadth-first order
            for rank in range(counts.get(path, 0)):
                paths.append((*path, rank))
                parents.append(node)
                ranks.append(rank)
        if set(counts) - set(paths):
            raise ValueError("every rank path of a template needs its parent")
        self.parents, self.ranks = np.array(parents), np.array(ranks)
        self.depths = np.array([len(path) for path in paths])
        self._levels = [self._level(depth) for depth in range(1, int(self.depths.max()) + 1)]

    def require(self, method: str, nodes: int) -> None:
        """Refuse a number of nodes that no draft on this tree has.

        Args:
            method: The drafter's name.
            nodes: How many nodes it is to draft at most.

        Raises:
            SettingsError: It is below 1 or above the number of nodes of the tree.
        """
        if not 1 <= nodes <= len(self):
            raise SettingsError(
                f"{method} drafts on a tree of {len(self)} nodes: give nodes from 1 to that, not {nodes}"
            )

    @classmethod
    def of(cls, children: Sequence[int]) -> Template:
        """The tree whose nodes, level by level and the root first, have so many children.

        Those left out have none.
        """
        counts: dict[tuple[int, ...], int] = {}
        paths: list[tuple[int, ...]] = [()]
        for path, count in zip(paths, children, strict=False):  # grows while it is walked
            counts[path] = count
            paths += [(*path, rank) for rank in range(count)]
        return cls(counts)

    def __len__(self) -> int:
        """Nodes below the root."""
        return len(self.parents) - 1

    @property
    def levels(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For every depth: its nodes [m], their parents [a] (each once), and which of these each node has [m]."""
        return self._levels

    @cached_property
    def plan(self) -> tuple[Level, ...]:
        """What is to be read ahead where nothing but ranks chooses nodes."""
        found = []
        for number, (nodes, _, place) in enumerate(self._levels, start=1):
            children = int(self.ranks[nodes].max()) + 1
            places = dict(zip(nodes.tolist(), (place * children + self.ranks[nodes]).tolist(), strict=True))
            following = self._levels[number][1].tolist() if number < len(self._levels) else []
            found.append(Level(children, tuple(places[node] for node in following)))
        return tuple(found)

    @lru_cache(maxsize=64)  # noqa: B019  # templates are few and live long
    def within(self, nodes: int, depth: int) -> Template:
        """The `nodes` best nodes within `depth`, rank r being worth 1 / ((r + 1)(r + 2))."""
        if nodes >= len(self) and depth >= int(self.depths.max()):
            return self
        worth = np.ones(len(self.parents))
        for place in range(1, len(worth)):
            worth[place] = worth[self.parents[place]] / ((self.ranks[place] + 1.0) * (self.ranks[place] + 2.0))
        worth[self.depths > depth] = 0.0
        # Stable, and no place is worth more than its parent or an earlier sibling: what is kept is closed.
        kept = np.argsort(-worth, kind="stable")[: nodes + 1]
        counts: dict[tuple[int, ...], int] = {}
        for place in kept[worth[kept] > 0][1:].tolist():
            path = self._path(place)
            counts[path[:-1]] = max(counts.get(path[:-1], 0), path[-1] + 1)
        return Template(counts)

    def _path(self, place: int) -> tuple[int, ...]:
        return (*self._path(int(self.parents[place])), int(self.ranks[place])) if place else ()

    def _level(self, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes at a depth, their parents (each once), and which of these each node has."""
        nodes = np.flatnonzero(self.depths == depth)
        above, place = np.unique(self.parents[nodes], return_inverse=True)
        return nodes, above, place

    def fill(
        self,
        last_token: int,
        children: Children,
        rates: np.ndarray,
        budget: Budget,
        *,
        eos_ids: Collection[int] = (),
        origin: Origin = "deterministic",
    ) -> tuple[DraftTree, np.ndarray]:
        """The template with tokens in it, cut to the budget, and which template node each of its nodes is.

        Missing successors, and what would follow the end of the text, are left out.

        Args:
            rates: [width], what a rank is worth; a place is worth the product along its path, and the places worth most
                are kept.
        """
        tokens = np.full(len(self.parents), -1, dtype=np.int64)
        values = np.zeros(len(self.parents))
        tokens[0], values[0] = last_token, 1.0
        for nodes, above, place in self._levels[: budget.depth]:
            alive = tokens[above] >= 0
            for eos in eos_ids:
                alive &= tokens[above] != eos
            if not alive.any():
                break
            found = children(above[alive], tokens)
            width = found.shape[1]
            table = np.full((len(above), width + 1), -1, dtype=np.int64)  # the last column: ranks there are none of
            table[alive, :width] = found
            ranks = np.minimum(self.ranks[nodes], width)
            tokens[nodes] = table[place, ranks]
            values[nodes] = values[self.parents[nodes]] * rates[np.minimum(ranks, len(rates) - 1)]
        filled = np.flatnonzero(tokens >= 0)
        if len(filled) - 1 > budget.nodes:
            # Stable, and no place is worth more than its parent: what is kept is closed.
            filled = np.sort(filled[np.argsort(-values[filled], kind="stable")[: budget.nodes + 1]])
        new = np.full(len(tokens) + 1, -1, dtype=np.int64)
        new[filled] = np.arange(len(filled))
        return DraftTree(tokens[filled], new[self.parents[filled]], origin), filled


@lru_cache(maxsize=64)
def unbalanced(nodes: int, depth: int, width: int) -> Template:
    """A template of up to `nodes` nodes; levels shrink with 1 / sqrt(level), first ranks reach `depth`.

    Within a level the places worth most are taken, where rank r is worth 1 / ((r + 1)(r + 2)).
    """
    depth = min(depth, nodes)
    wanted = np.arange(1, depth + 1) ** -0.5
    wanted *= nodes / wanted.sum()
    sizes = [1] * depth
    for _ in range(nodes - depth):
        # The level that lacks most, among those whose parents leave room.
        room = [size < width * above for size, above in zip(sizes, [1, *sizes], strict=False)]
        sizes[int(np.argmax(np.where(room, wanted - sizes, -np.inf)))] += 1
    counts: dict[tuple[int, ...], int] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for size in sizes:
        worth = {
            (*path, rank): value / ((rank + 1.0) * (rank + 2.0))
            for path, value in level.items()
            for rank in range(width)
        }
        taken = sorted(worth, key=lambda path: (-worth[path], path))[:size]
        for path in taken:
            counts[path[:-1]] = max(counts.get(path[:-1], 0), path[-1] + 1)
        level = {path: worth[path] for path in taken}
    return Template(counts)


@lru_cache(maxsize=64)
def calibrated(rates: tuple[tuple[float, ...], ...], nodes: int, depth: int) -> Template:
    """The `nodes` places most likely to be right and no deeper than `depth`.

    Args:
        rates: By depth and rank, how often the guess there is right; a place is worth the product along its path, and
            no more than an earlier sibling.
    """
    table = np.zeros((min(depth, len(rates)), max(map(len, rates))))
    for level, ranks in zip(table, rates, strict=False):
        level[: len(ranks)] = np.minimum.accumulate(ranks)
    above, places, _, chances = (each[1:].tolist() for each in most_likely(table, nodes))
    counts: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = [()]
    for parent, rank, chance in zip(above, places, chances, strict=True):
        paths.append((*paths[parent], rank))
        if chance > 0:
            counts[paths[parent]] = max(counts.get(paths[parent], 0), rank + 1)
    return Template(counts)


@lru_cache(maxsize=64)
def constant(method: str, branching: tuple[int, ...]) -> Template:
    """The template in which every node at depth d has `branching[d]` children.

    Raises:
        SettingsError: In the name of `method`, for no shape or one of more nodes than any budget has.
    """
    if not branching or min(branching) < 1:
        raise SettingsError(f"{method} needs at least one child per node, as in branching=4/2/1")
    if sum(prod(branching[: depth + 1]) for depth in range(len(branching))) > MOST:
        raise SettingsError(f"{method} grows at most {MOST} nodes; give fewer children in branching")
    counts: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = [()]
    for width in branching:
        counts |= dict.fromkeys(paths, width)
        paths = [(*path, rank) for path in paths for rank in range(width)]
    return Template(counts)


TOKEN_RECYCLING = Template(
    {
        (): 8,
        **{(rank,): count for rank, count in enumerate((8, 4, 3, 2, 1, 1, 1, 1))},
        **{(0, rank): count for rank, count in enumerate((8, 3, 2, 1, 1, 1, 1, 1))},
        **{(1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1},
        **{(0, 0, rank): count for rank, count in enumerate((5, 2, 1, 1, 1))},
        **{(0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1},
        **{(0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1},
        **{(0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1},
        **{(0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1},
    }
)
"""The published tree of Token Recycling, version 2.2.2: 80 nodes, 8 / 21 / 25 / 15 / 8 / 3 per depth."""

STAND_CHILDREN = (
    *(9, 6, 4, 3, 2, 1, 1, 1, 1, 0, 5, 3, 1, 1, 0, 1, 3, 2, 0, 1, 2, 0, 0, 1, 0, 0, 0),
    *(0, 0, 3, 1, 1, 1, 0, 3, 0, 0, 1, 1, 0, 3, 0, 0, 0, 0, 0, 1, 0, 0, 2, 1, 1, 1, 0),
    *(1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1),
)
STAND = Template.of(STAND_CHILDREN)
"""The 80 of 625 places accepted most often in sampled solutions of 29 GSM8K problems by the embedded model, three each:
what `python benchmarks/draft/calibrate.py stand --problems 29` finds."""
