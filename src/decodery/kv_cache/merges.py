"""What evicted slots leave to those that stay, in arrays that kernels write row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decodery.models.cache.cache import KVCache
from decodery.models.cache.eviction import Merge


@dataclass(eq=False)
class Merges:
    """Merges after every tentative row, and the least similarity after the content.

    Attributes:
        known: [layers, kv_heads] float64, the least similarity, not a number where there is none.
        beta, threshold, weighted: See `Merge`.
    """

    known: np.ndarray
    beta: float
    threshold: bool
    weighted: bool
    _rows: Merge | None = field(default=None, init=False)
    _counts: np.ndarray | None = field(default=None, init=False)

    @property
    def bytes(self) -> int:
        """Bytes of what tentative rows have changed."""
        if self._rows is None:
            return self.known.nbytes
        return self.known.nbytes + sum(each.nbytes for each in (self._rows.limits, self._rows.targets, self._rows.rows))

    @staticmethod
    def most_bytes(layers: int, evicting: int, kv_heads: int, row: int, rows: int) -> int:
        """Bytes, at most, where each row of a pass leaves out one slot, whose keys or values take `row` bytes."""
        numbers, slot = np.dtype(np.float64).itemsize, np.dtype(np.int32).itemsize + 2 * row
        # What a path has changed is put together when it becomes content.
        return layers * kv_heads * numbers + rows * kv_heads * (evicting * (numbers + 2 * slot) + layers * slot)

    def open(self, cache: KVCache, parents: np.ndarray, keeps: np.ndarray, acting: Sequence[int]) -> Merge:
        """Make room for what the rows of a pass change.

        Args:
            cache: Whose rows they are.
            parents: [retained + rows] int32, which of these each goes on from, -1 for content.
            keeps: [layers, rows] how many slots stay after a row.
            acting: The layers that evict.
        """
        places, n, retained = len(parents), keeps.shape[1], len(parents) - keeps.shape[1]
        counts, lengths = np.zeros((places, len(acting)), dtype=np.int64), cache.lengths[acting]
        if retained:
            assert self._counts is not None
            counts[:retained] = self._counts[:retained]
        most = 1
        for row in range(n):
            parent = int(parents[retained + row])
            before = 1 + (lengths if parent < 0 else counts[parent])
            gone = np.maximum(before - keeps[acting, row], 0)
            counts[retained + row], most = before - gone, max(most, int(gone.max()))
        if retained:
            assert self._rows is not None
            most = max(most, self._rows.targets.shape[3])
        pool, shape = cache.pages.pool, (places, len(acting), self.known.shape[1])
        found = Merge(
            self.known, np.full(shape, np.nan), np.full((*shape, most), -1, dtype=np.int32),
            np.empty((*shape, most, 2, pool.row * pool.dtype.itemsize), dtype=np.uint8),
            self.beta, self.threshold, self.weighted,
        )  # fmt: skip
        if retained and self._rows is not None:
            wide = self._rows.targets.shape[3]
            found.limits[:retained] = self._rows.limits[:retained]
            found.targets[:retained, ..., :wide] = self._rows.targets[:retained]
            found.rows[:retained, ..., :wide, :, :] = self._rows.rows[:retained]
        if places > 1 and cache.pages.shared:
            # Later rows are read with the changes in place.
            stops = np.zeros((len(self.known), 1), dtype=np.int64)
            stops[acting, 0] = lengths + places
            cache.pages.own(np.zeros_like(stops), stops)
        self._rows, self._counts = found, counts
        return found

    def forget(self) -> None:
        """No row is tentative any more."""
        self._rows = self._counts = None

    def keep(self, cache: KVCache, rows: np.ndarray, acting: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What slots that hold other rows become, after these rows became content: see `MappedPool.lose`."""
        assert self._rows is not None
        self.known[acting] = self._rows.limits[rows[-1]]
        targets, k = np.moveaxis(self._rows.targets[rows], 0, 2), len(rows)
        if rows[-1] >= k:
            starts = (cache.lengths[acting] - k)[:, None, None, None]
            moved = targets >= starts
            places = np.where(moved, targets - starts, 0)
            targets = np.where(moved, starts + np.searchsorted(rows, places), targets).astype(np.int32)
        changed = np.moveaxis(self._rows.rows[rows], 0, 2)
        layers, heads, count = *self.known.shape, targets.shape[2] * targets.shape[3]
        every = np.full((layers, heads, count), -1, dtype=np.int32)
        every[acting] = targets.reshape(len(acting), heads, count)
        stored = np.zeros((layers, heads, count, *changed.shape[4:]), dtype=np.uint8)
        stored[acting] = changed.reshape(len(acting), heads, count, *changed.shape[4:])
        return every, stored
