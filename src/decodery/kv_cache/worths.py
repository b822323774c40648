"""What the slots of all layers are worth, in arrays that kernels update row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.cache.eviction import Eviction

from .merges import Merges

_NO_SLOT = np.iinfo(np.int32).max
_SPARE = 64
"""Slots by which scores grow."""


class Worths:
    """Scores of the slots that each key-value head holds, and what every tentative row adds to them.

    Scores are sums in double precision of what rows add in single precision. Of a pass only the latter is kept until it
    is known which rows become content; the scores after its rows are there for one layer at a time.

    Attributes:
        held: [layers, kv_heads, slots] float64, of content.
        added: [rows, evicting layers, kv_heads or 1, slots] float32 by tentative row, -1 where a head does not hold a
            slot after it; of one head where all have the same. None without such rows.
        merges: What becomes of evicted slots, None where they are lost.
    """

    def __init__(
        self, scores: Mapping[int, np.ndarray], layers: int, merges: Merges | None = None, *, newest: bool = False
    ) -> None:
        """Take scores [kv_heads, slots] by layer, of `layers` in total; `newest` as in `Eviction`."""
        self._acting, self._newest = [*scores], newest
        self._places = np.full(layers, -1, dtype=np.int32)
        self._places[self._acting] = np.arange(len(self._acting))
        kv_heads = len(scores[self._acting[0]])
        self.held = np.zeros((layers, kv_heads, _roomy(max(each.shape[1] for each in scores.values()) + 1)))
        for layer, each in scores.items():
            self.held[layer, :, : each.shape[1]] = each
        self.added: np.ndarray | None = None
        self.merges = merges
        self._room: np.ndarray | None = None
        self._parents = np.zeros(0, dtype=np.int32)

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        arrays = [each.nbytes for each in (self.held, self.added, self._room) if each is not None]
        return sum(arrays) + (0 if self.merges is None else self.merges.bytes)

    @staticmethod
    def most_bytes(layers: int, evicting: int, kv_heads: int, slots: int, rows: int, *, newest: bool) -> int:
        """Bytes, at most, of scores of so many slots, so many tentative rows included; without merges."""
        held = layers * kv_heads * _roomy(slots) * np.dtype(np.float64).itemsize
        added = rows * evicting * (1 if newest else kv_heads) * slots * np.dtype(np.float32).itemsize
        # Before a pass scores may be copied to where there is more room.
        return held + max(added + rows * kv_heads * slots * np.dtype(np.float64).itemsize, held)

    def open(self, segment: Segment, keeps: np.ndarray, first: int, last: np.ndarray) -> Eviction:
        """Make room for the rows of a pass; arguments are those of `Eviction`."""
        cache, n, retained = segment.cache, len(segment), segment.retained
        assert cache is not None
        slots, kv_heads = int(cache.lengths[self._acting].max()) + retained + n, self.held.shape[1]
        if slots > self.held.shape[2]:
            wider = np.zeros((*self.held.shape[:2], _roomy(slots)))
            wider[..., : self.held.shape[2]] = self.held
            self.held = wider
        before, self._room = self.added, None
        added = np.zeros((retained + n, len(self._acting), 1 if self._newest else kv_heads, slots), dtype=np.float32)
        if retained:
            assert before is not None
            # Layers that lose nothing may be longer than the widest of the others.
            width = min(before.shape[3], slots)
            added[:retained] = -1
            added[:retained, ..., :width] = before[:retained, ..., :width]
        self.added, seen = added, segment.seen()
        sees = [np.flatnonzero(seen[row, : retained + row]) for row in range(n)]
        parents = np.array([each[-1] if len(each) else -1 for each in sees], dtype=np.int32)
        self._parents = np.concatenate((self._parents[:retained], parents))
        self._room = np.empty((retained + n, kv_heads, slots))
        merge = None if self.merges is None else self.merges.open(cache, self._parents, keeps, self._acting)
        return Eviction(
            self._places, self.held, added, self._room, self._parents, keeps, first, last, self._newest, merge
        )

    def keep(self, cache: KVCache, rows: Sequence[int]) -> None:
        """Let the last of these rows, which have just become content, decide what the cache holds."""
        assert self.added is not None
        self._room = None
        ends, k, picked = cache.lengths, len(rows), np.asarray(rows)
        n = len(self.added)
        for place, layer in enumerate(self._acting):
            start = int(ends[layer]) - k
            own = self.held[layer, :, : start + n]
            own[:, start:] = 0
            last = self.added[rows[-1], place, :, : start + n]
            if self._newest:
                own[:] = last
            else:
                for row in rows:
                    # Later rows of the path are at slots that this one does not hold.
                    own += np.maximum(self.added[row, place, :, : start + n], 0)
                own[last < 0] = -1
            if rows[-1] >= k:
                own[:, start : start + k] = own[:, start + picked]
        changed = None if self.merges is None else self.merges.keep(cache, picked, self._acting)
        heads, slots = self.held.shape[1:]
        gone = np.flatnonzero(self.held < 0)
        gone = gone[gone % slots < ends[gone // (heads * slots)]]
        if len(gone):
            head, slot = gone // slots, gone % slots
            counts = np.bincount(head, minlength=len(self.held) * heads)
            lost = np.full((len(counts), counts.max()), _NO_SLOT, dtype=np.int32)
            lost[head, np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)] = slot
            cache.lose(lost.reshape(len(self.held), heads, -1), self.held, changed)

    def forget(self) -> None:
        """No row is tentative any more."""
        self.added = self._room = None
        if self.merges is not None:
            self.merges.forget()

    def scores(self, lengths: np.ndarray) -> dict[int, np.ndarray]:
        """By layer, scores [kv_heads, slots] of content of these lengths [layers]."""
        return {layer: self.held[layer, :, : int(lengths[layer])] for layer in self._acting}


def _roomy(slots: int) -> int:
    return -(-slots // _SPARE) * _SPARE
