"""Keys and values of a canvas's earlier passes, and the record by which they can be computed again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decodery.models.cache.cache import KVCache
from decodery.models.cache.page_pool import SLOTS
from decodery.models.protocol import LanguageModel

from .cache.base import Plan


class Passed(NamedTuple):
    """A pass that the caches were prepared for.

    Attributes:
        keys: Positions that it reads.
        rows: Positions that it computes.
        tokens: Tokens of `rows`.
        fresh: See `Plan`.
        alone: Whether it scores a single state, so that the caches hold its rows afterwards.
    """

    keys: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    fresh: bool
    alone: bool


class KeptPasses:
    """The caches of a canvas.

    Args:
        model: The model that fills it.
        count: Number of caches: none where nothing is reused; with guidance two, the second one without the prompt.

    Attributes:
        caches: The caches.
        passes: The passes whose rows they hold.
        pending: The pass in progress.
    """

    def __init__(self, model: LanguageModel, count: int) -> None:
        self._model = model
        self.caches = [model.new_cache() for _ in range(count)]
        self.passes: list[Passed] = []
        self.pending: Passed | None = None

    def ready(self, passed: Passed, states: int) -> list[list[KVCache]]:
        """The caches of every state of a pass: they hold what it reads, without the rows that it computes."""
        self.pending = passed
        self.select(passed)
        if states == 1:
            return [self.caches]
        return [[each.fork() for each in self.caches] for _ in range(states)]

    def select(self, passed: Passed) -> None:
        """Let the caches hold what a pass reads, without the rows that it computes."""
        for kept in self.caches:
            there = kept.positions[0, : kept.length + kept.tentative]
            kept.select(np.flatnonzero(np.isin(there, passed.keys) & ~np.isin(there, passed.rows)))

    def note(self, plan: Plan) -> None:
        """Record a pass that left keys and values; drop the records of passes whose rows were all replaced."""
        passed, self.pending = self.pending, None
        if passed is None or not passed.alone:
            return
        if plan.fresh:
            # A fresh pass computes all rows except final ones, which earlier fresh passes have computed.
            self.passes = [each for each in self.passes if each.fresh] if len(plan.keys) else []
        self.passes.append(passed)

    def due(self, length: int, rows: int, states: int) -> int:
        """Bytes of pages that the next pass takes at most.

        Args:
            length: Tokens of the canvas.
            rows: Rows that each state computes, where there are several.
            states: States of the pass.
        """
        found = 0
        for each in self.caches:
            ends = np.full((len(each.lengths), 1), length)
            found += each.pages.wanting(np.zeros_like(ends), ends) * each.pages.pool.page_bytes
            # Forks share what comes before their rows, but for a page in part.
            found += (states > 1) * states * (-(-rows // SLOTS) + 2) * SLOTS * each.slot_bytes
        return found

    def give_back(self) -> bool:
        """Drop all keys and values, unless a pass over several states shares them."""
        if not self.caches or (self.pending is not None and not self.pending.alone):
            return False
        for each in self.caches:
            each.become(self._model.new_cache())
        return True
