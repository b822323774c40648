"""What the slots of all layers are worth, in arrays that kernels update row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.cache.eviction import Eviction

from .merges import Merges

_NO_SLOT = np.iinfo(np.int32).max


class Worths:
    """Scores of the slots that each key-value head holds, after the content and after every tentative row.

    Attributes:
        held: [layers, kv_heads, slots] float64, of content.
        rows: The same after each tentative row, -1 where a head does not hold a slot; None without such rows.
        merges: What becomes of evicted slots, None where they are lost.
    """

    def __init__(self, scores: Mapping[int, np.ndarray], layers: int, merges: Merges | None = None) -> None:
        """Take scores [kv_heads, slots] by layer, of `layers` in total."""
        self._acting = [*scores]
        self._acts = np.isin(np.arange(layers), self._acting)
        kv_heads = len(scores[self._acting[0]])
        self.held = np.zeros((layers, kv_heads, max(each.shape[1] for each in scores.values())))
        for layer, each in scores.items():
            self.held[layer, :, : each.shape[1]] = each
        self.rows: np.ndarray | None = None
        self.merges = merges
        self._parents = np.zeros(0, dtype=np.int32)

    @property
    def bytes(self) -> int:
        """Bytes of what is held after tentative rows."""
        beside = 0 if self.merges is None else self.merges.bytes
        return beside + (0 if self.rows is None else self.rows.nbytes)

    def open(self, segment: Segment, keeps: np.ndarray, first: int, last: np.ndarray, *, newest: bool) -> Eviction:
        """Make room for the rows of a pass; arguments are those of `Eviction`."""
        cache, n, retained = segment.cache, len(segment), segment.retained
        assert cache is not None
        slots = int(cache.lengths[self._acting].max()) + retained + n
        worths = np.zeros((retained + n, *self.held.shape[:2], slots))
        if retained:
            assert self.rows is not None
            width = min(self.rows.shape[3], worths.shape[3])
            # Layers that lose nothing may be longer than the widest of the others.
            worths[:retained, self._acts] = -1
            worths[:retained, ..., :width] = self.rows[:retained, ..., :width]
        self.rows, seen = worths, segment.seen()
        before = [np.flatnonzero(seen[row, : retained + row]) for row in range(n)]
        parents = np.array([each[-1] if len(each) else -1 for each in before], dtype=np.int32)
        self._parents = np.concatenate((self._parents[:retained], parents))
        merge = None if self.merges is None else self.merges.open(cache, self._parents, keeps, self._acts)
        return Eviction(self._acts, self.held, worths, self._parents, keeps, first, last, newest, merge)

    def keep(self, cache: KVCache, rows: Sequence[int]) -> None:
        """Let the last of these rows, which have just become content, decide what the cache holds."""
        assert self.rows is not None
        found, k = self.rows[rows[-1]], len(rows)
        if len(self.rows) > 1:
            found = found.copy()
        ends, picked = cache.lengths, np.asarray(rows)
        if rows[-1] >= k:
            for layer in self._acting:
                start = int(ends[layer]) - k
                found[layer, :, start : start + k] = found[layer][:, start + picked]
        changed = None if self.merges is None else self.merges.keep(cache, picked)
        heads, slots = found.shape[1:]
        gone = np.flatnonzero(found < 0)
        gone = gone[gone % slots < ends[gone // (heads * slots)]]
        if len(gone):
            place, slot = gone // slots, gone % slots
            counts = np.bincount(place, minlength=len(found) * heads)
            lost = np.full((len(counts), counts.max()), _NO_SLOT, dtype=np.int32)
            lost[place, np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)] = slot
            cache.lose(lost.reshape(len(found), heads, -1), found, changed)
        self.held = found

    def forget(self) -> None:
        """No row is tentative any more."""
        self.rows = None
        if self.merges is not None:
            self.merges.forget()

    def scores(self, lengths: np.ndarray) -> dict[int, np.ndarray]:
        """By layer, scores [kv_heads, slots] of content of these lengths [layers]."""
        return {layer: self.held[layer, :, : int(lengths[layer])] for layer in self._acting}
