"""The trees of all texts of a step in arrays: rows, depths, siblings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from decodery.models.step_arrays import StepArrays
from decodery.models.torch.tree_walk import TWIN


@dataclass(frozen=True)
class Trees:
    """What a step goes by beside the arrays.

    Attributes:
        owners: [rows] the text of each row.
        chains: [texts] whether each tree is a chain.
        above: [rows] the row that each follows, itself where it is a root.
        nodes: [2 (tokens, parents), rows] int64 for `tree_walk.walk`, empty where all trees are roots.
        doublings: Of the walk, -1 where there is none.
        children: [rows] how many each node has.
        ranks: [rows] how many siblings come before each node.
    """

    owners: np.ndarray
    chains: np.ndarray
    above: np.ndarray
    nodes: np.ndarray
    doublings: int
    children: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, steps: StepArrays, texts: int) -> Self:
        """The trees whose `sizes`, `drafts` and `first` are written; writes the rows of the arrays.

        Args:
            steps: The arrays.
            texts: How many there are.
        """
        rows, sizes, first = steps.rows, steps.sizes[:texts], steps.first[:texts]
        owners, every = np.repeat(np.arange(texts), sizes), np.arange(rows)
        roots, local = first[owners], every - first[owners]
        steps.tokens[:rows], steps.parents[:rows] = steps.last[owners], -1
        steps.depths[:rows] = 0
        chains, nodes, doublings = np.ones(texts, dtype=bool), np.empty((2, 0), dtype=np.int64), -1
        above = every
        children = ranks = np.zeros(rows, dtype=np.int64)
        if rows > texts:
            below = np.flatnonzero(local)
            of, number = owners[below], local[below]
            steps.tokens[below], parents = steps.drafts[0, of, number], steps.drafts[1, of, number]
            steps.parents[below] = parents
            chains[of[parents != number - 1]] = False
            above = every.copy()
            above[below] = roots[below] + parents
            nodes = np.stack((steps.tokens[:rows], above))
            jumps, depths, doublings = above, (local > 0).astype(np.int64), 0
            while (jumps != roots).any():
                depths, jumps, doublings = depths + depths[jumps], jumps[jumps], doublings + 1
            steps.depths[:rows] = depths
            children = np.bincount(above[below], minlength=rows)
            order = below[np.argsort(above[below], kind="stable")]
            ranks = np.zeros(rows, dtype=np.int64)
            ranks[order] = np.arange(len(order)) - (np.cumsum(children) - children)[above[order]]
            pairs = above[order] << 32 | steps.tokens[order]
            _, firsts = np.unique(pairs, return_index=True)
            twins = np.ones(len(order), dtype=bool)
            twins[firsts] = False
            nodes[0, order[twins]] = TWIN
        steps.positions[:rows] = steps.next[owners] + steps.depths[:rows]
        return cls(owners, chains, above, nodes, doublings, children, ranks)
