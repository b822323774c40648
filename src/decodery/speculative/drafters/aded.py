"""ADED: a Monte Carlo tree search over trigram weights that follow the text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.noise import mix
from decodery.core.registry import register
from decodery.models.trained.artifact import remembered
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Scope
from decodery.step.sequence import Sequence

from ..stores.datastore import Datastore
from ..stores.trigrams import Trigrams
from ..tree_building.monte_carlo import SearchTree, Successors, enumerate_all, search

_PAIRS = 1 << 16


@register(
    "aded",
    paper="Adaptive Draft-Verification for Efficient Large Language Model Decoding (2024)",
    lossless=True,
)
@dataclass(frozen=True)
class ADED(Drafter):
    """Searches the most likely continuations in a table of trigrams that every new token reinforces.

    Memory: 65,536 pairs, the least recently used leave first. The paper scores paths by the weights on them, as here;
    its code looks up another token's weight by mistake.

    Attributes:
        datastore: A folder made by `decodery train datastore`, whose `successors` heaviest trigrams per pair fill the
            table first; without one it begins empty.
        successors: Trigrams kept per pair of tokens.
        increment, cap, window: Before every draft each trigram of the last `window` tokens gains `increment`, up to
            `cap`.
        simulations, depth, c1, c2: The search; its tree has `depth` levels with the root.
        paths: The most visited nodes become drafts, each with its heaviest continuation after it.
        nodes: Their lengths sum to no more than this. A table so sparse that it allows no more than `paths`
            continuations is not searched but taken whole.
        scope: How long the table is kept.
    """

    datastore: str | None = None
    successors: int = 12
    increment: float = 0.04
    cap: float = 3.0
    window: int = 16
    simulations: int = 150
    depth: int = 4
    c1: float = 32.0
    c2: float = 8.0
    paths: int = 24
    nodes: int = 64
    scope: Scope = "process"

    def __post_init__(self) -> None:
        counts = (self.successors, self.simulations, self.paths, self.nodes)
        if min(counts) < 1 or self.depth < 2 or self.window < 3 or min(self.increment, self.cap, self.c1, self.c2) <= 0:
            raise SettingsError(
                "aded needs successors, simulations, paths and nodes >= 1, depth >= 2, window >= 3, and increment, "
                "cap, c1 and c2 above 0"
            )

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> Trigrams:
        store = None if self.datastore is None else Datastore.open(self.datastore)
        if store is not None:
            store.fits(seq.request.vocab_size)

        def make() -> Trigrams:
            table = Trigrams(_PAIRS)
            if self.datastore is not None:
                table.load(_documents(self.datastore), self.successors)
            return table

        # A datastore that was made anew is another one.
        key = ("aded", store, self.successors, self.increment, self.cap, self.window)
        table: Trigrams = seq.request.memory.recall(self.scope, seq, key, make)
        return table

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        table: Trigrams = seq.states[self]
        table.reinforce(seq.tokens[-self.window :], self.increment, self.cap)
        if len(seq.tokens) < 2:
            return DraftTree.root(seq.last_token)
        pair = (seq.tokens[-2], seq.tokens[-1])
        successors = cache(table.successors)  # the search comes by the same pairs again and again
        tree = enumerate_all(pair, successors, self.depth, self.paths)
        if tree is None:
            tree = search(
                pair,
                successors,
                simulations=self.simulations,
                depth=self.depth,
                c1=self.c1,
                c2=self.c2,
                random=Random(mix(seq.request.seed, len(seq.tokens))),
            )
        paths = [path[: budget.depth] for path in self._paths(tree, pair, successors)]
        return DraftTree.from_paths(seq.last_token, paths, nodes=min(self.nodes, budget.nodes))

    def _paths(self, tree: SearchTree, pair: tuple[int, int], successors: Successors) -> list[tuple[int, ...]]:
        """The best paths, most visited first, without their continuations' weakest: at most `nodes` tokens in all."""
        ranked = sorted(range(1, len(tree.tokens)), key=lambda node: -tree.visits[node])[: self.paths]
        found: dict[tuple[int, ...], None] = {}
        for path in map(tree.path, ranked):
            before, last = (pair[1], *path)[-2:]
            following = successors(before, last)
            if following:
                path = (*path, max(following, key=lambda each: each[1])[0])
            found[path] = None
        size = sum(map(len, found))
        # The longest go first, and of equally long ones those visited least.
        places = {path: place for place, path in enumerate(found)}
        for path in sorted(found, key=lambda path: (len(path), places[path]), reverse=True):
            if size <= self.nodes:
                break
            size -= len(path)
            del found[path]
        return list(found)


@remembered
def _documents(folder: Path) -> list[np.ndarray]:
    return Datastore.open(str(folder)).documents()
