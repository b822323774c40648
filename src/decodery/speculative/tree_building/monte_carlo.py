"""Monte Carlo tree search over weighted successors: a tree that grows where paths score well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log, sqrt
from random import Random

Successors = Callable[[int, int], list[tuple[int, float]]]
"""Tokens that follow a pair of tokens, and their weights."""


@dataclass(slots=True)
class SearchTree:
    """Nodes in the order they were made; node 0 is the root, whose token is the last one of the text.

    Attributes:
        depths: 1 for the root.
        first, count: Where a node's children stand, -1 for a node that was never expanded.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [1])
    priors: list[float] = field(default_factory=lambda: [0.0])
    visits: list[int] = field(default_factory=lambda: [0])
    scores: list[float] = field(default_factory=lambda: [0.0])
    first: list[int] = field(default_factory=lambda: [-1])
    count: list[int] = field(default_factory=lambda: [0])

    def expand(self, node: int, successors: list[tuple[int, float]]) -> None:
        self.first[node], self.count[node] = len(self.tokens), len(successors)
        for token, weight in successors:
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.priors.append(weight)
            self.visits.append(0)
            self.scores.append(0.0)
            self.first.append(-1)
            self.count.append(0)

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from below the root down to `node`."""
        tokens = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))


def search(
    pair: tuple[int, int],
    successors: Successors,
    *,
    simulations: int,
    depth: int,
    c1: float,
    c2: float,
    random: Random,
) -> SearchTree:
    """The tree after `simulations` simulations from the text that ends with `pair`.

    It has `depth` levels with the root. Each goes down to a node that was never expanded, along the children of
    greatest S/n + w * sqrt(N) / (1 + n) * (c1 + ln((N + c2 + 1) / c2)), an unvisited child first; makes its children,
    steps into one at random, draws on by weight to the depth limit, and adds 1 + the sum of weights on its way to all
    nodes it passed. S, n: a child's score and visits; w its weight; N its parent's visits.
    """
    tree = SearchTree([pair[1]])
    for _ in range(simulations):
        node, before, total = 0, pair[0], 1.0
        while tree.count[node] and tree.depths[node] < depth:
            before, node = tree.tokens[node], _best_child(tree, node, c1, c2)
            total += tree.priors[node]
        if tree.first[node] < 0 and tree.depths[node] < depth:
            tree.expand(node, successors(before, tree.tokens[node]))
            if tree.count[node]:
                before, node = tree.tokens[node], tree.first[node] + int(random.random() * tree.count[node])
                total += tree.priors[node]
        total += _roll_out(before, tree.tokens[node], depth - tree.depths[node], successors, random)
        while node >= 0:
            tree.visits[node] += 1
            tree.scores[node] += total
            node = tree.parents[node]
    return tree


def enumerate_all(pair: tuple[int, int], successors: Successors, depth: int, most: int) -> SearchTree | None:
    """The whole tree if it has at most `most` nodes below the root: then there is nothing to search.

    Else None.
    """
    tree, befores = SearchTree([pair[1]]), [pair[0]]
    node = 0
    while node < len(tree.tokens):
        if tree.depths[node] < depth:
            tree.expand(node, successors(befores[node], tree.tokens[node]))
            befores += [tree.tokens[node]] * tree.count[node]
            if len(tree.tokens) - 1 > most:
                return None
        node += 1
    return tree


def _best_child(tree: SearchTree, node: int, c1: float, c2: float) -> int:
    visits, scores, priors, seen = tree.visits, tree.scores, tree.priors, tree.visits[node]
    explore = sqrt(seen) * (c1 + log((seen + c2 + 1.0) / c2))
    best, most = -1, -1.0
    for child in range(tree.first[node], tree.first[node] + tree.count[node]):
        n = visits[child]
        if n == 0:
            return child
        value = scores[child] / n + priors[child] * explore / (1 + n)
        if value > most:
            best, most = child, value
    return best


def _roll_out(before: int, token: int, steps: int, successors: Successors, random: Random) -> float:
    """Sum of the weights of up to `steps` tokens drawn one after another."""
    total = 0.0
    for _ in range(steps):
        following = successors(before, token)
        if not following:
            break
        reached = random.random() * sum(weight for _, weight in following)
        drawn = following[-1]
        for each in following:
            reached -= each[1]
            if reached < 0:
                drawn = each
                break
        before, token = token, drawn[0]
        total += drawn[1]
    return total
