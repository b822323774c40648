"""Trees of the commonest continuations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decodery.step.draft_tree import DraftTree


@dataclass(frozen=True)
class Counted:
    """A trie of continuations, parents before children, by depth.

    Attributes:
        counts: How many continuations begin with the path to a node.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    counts: np.ndarray

    def tree(self, last_token: int, values: np.ndarray, nodes: int) -> DraftTree:
        """The `nodes` nodes of greatest value.

        Equals: by depth.

        Args:
            values: [m], nowhere greater than at the parent.
        """
        chosen = best(values, nodes)
        place = np.full(len(values) + 1, 0, dtype=np.int64)
        place[chosen] = np.arange(1, len(chosen) + 1)
        return DraftTree(
            np.concatenate(([last_token], self.tokens[chosen])), np.concatenate(([-1], place[self.parents[chosen]]))
        )


def best(values: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of the `count` greatest values, lowest index first among equals."""
    if count >= len(values):
        return np.arange(len(values))
    if count < 1:
        return np.empty(0, dtype=np.int64)
    bound = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > bound)
    return np.sort(np.concatenate((above, np.flatnonzero(values == bound)[: count - len(above)])))


def count_prefixes(windows: np.ndarray, vocab_size: int, per_depth: int | None = None) -> Counted:
    """The trie of `windows` [hits, length], one continuation per row in lexicographic order.

    -1: it has ended. Ids that are no tokens end a continuation too.

    Args:
        per_depth: Only so many nodes per depth, the commonest.
    """
    tokens, parents, depths, counts = [], [], [], []
    rows = np.arange(len(windows))
    owner = np.full(len(windows), -1)
    total = 0
    for depth in range(windows.shape[1]):
        column = windows[rows, depth]
        alive = (column >= 0) & (column < vocab_size)
        rows, owner, column = rows[alive], owner[alive], column[alive]
        if not len(rows):
            break
        if len(rows) == 1:  # a single continuation goes on by itself
            chain = windows[rows[0], depth:]
            chain = chain[np.logical_and.accumulate((chain >= 0) & (chain < vocab_size))]
            tokens.append(chain)
            parents.append(np.r_[owner, total + np.arange(len(chain) - 1)])
            depths.append(depth + 1 + np.arange(len(chain)))
            counts.append(np.ones(len(chain)))
            break
        new = np.r_[True, (column[1:] != column[:-1]) | (owner[1:] != owner[:-1])]
        starts = np.flatnonzero(new)
        sizes = np.diff(np.append(starts, len(rows)))
        group = np.cumsum(new) - 1
        kept = np.arange(len(starts)) if per_depth is None else best(sizes, per_depth)
        place = np.full(len(starts), -1)
        place[kept] = total + np.arange(len(kept))
        tokens.append(column[starts[kept]])
        parents.append(owner[starts[kept]])
        depths.append(np.full(len(kept), depth + 1))
        counts.append(sizes[kept])
        total += len(kept)
        owner = place[group]
        stays = owner >= 0
        rows, owner = rows[stays], owner[stays]
    if not tokens:
        nothing = np.empty(0, dtype=np.int64)
        return Counted(nothing, nothing, nothing, nothing)
    return Counted(*(np.concatenate(part).astype(np.int64) for part in (tokens, parents, depths, counts)))


def frequency_tree(
    last_token: int, windows: np.ndarray, nodes: int, vocab_size: int, *, per_depth: int | None = None
) -> DraftTree:
    """The `nodes` commonest beginnings of continuations.

    Args:
        windows, per_depth: See `count_prefixes`.
    """
    counted = count_prefixes(windows, vocab_size, per_depth)
    return counted.tree(last_token, counted.counts, nodes)
