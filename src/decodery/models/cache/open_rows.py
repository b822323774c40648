"""Room in a cache for rows that a kernel appends by itself, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodery.core.native.kernels import address
from decodery.core.native.structs import SegmentStruct

from . import pages
from .page_pool import SLOTS, MappedPool

if TYPE_CHECKING:
    from .cache import KVCache

ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}
"""What caches hold, by the number of `Element` in csrc/abi.h."""


class OpenRows:
    """A cache that a kernel appends rows to, and where it finds that cache.

    A kernel writes keys and values after the content, and their positions into the cache's table, and makes content of
    rows by raising `lengths` in all layers. Whoever drives it adds as much to `next_position`.

    Args:
        cache: One that holds all it has read, in the same slots of all layers.

    Attributes:
        store, pages, lengths, positions, mine: What the cache held when `open` was called: others since then mean that
            it was changed.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.store, self.pages = cache.store, cache.pages
        self.lengths = cache.lengths
        self.mine = (0, 0)
        self.positions = np.empty((0, 0), dtype=np.int32)
        self._slots = 0

    @staticmethod
    def serves(cache: KVCache) -> bool:
        """Whether rows can be appended to a cache in this way."""
        return (
            cache.policy is None
            and cache.memory is None
            and not cache.tentative
            and not cache.evicted
            and cache.slot_positions.table[1] == 0
        )

    @property
    def unchanged(self) -> bool:
        """Whether what `describe` has written is still right."""
        cache = self.cache
        return (
            cache.store is self.store
            and self.store.pages is self.pages
            and cache.lengths is self.lengths
            and self.pages.written_from is self.mine
            and cache.slot_positions.held is self.positions
            and not cache.tentative
            and cache.policy is None
            and self.store.losses.lost is None
        )

    def last_position(self, rows: int) -> int:
        """The last value of `next_position` at which the kernel may append so many rows."""
        return self._slots - self.cache.prefix - rows

    def has_room(self, rows: int) -> bool:
        """Whether the kernel may append so many rows, with what `describe` has written still right."""
        return self.unchanged and self.cache.next_position <= self.last_position(rows)

    def open(self, rows: int) -> None:
        """Make room, owned by this cache alone, for `rows` more rows at least."""
        cache = self.cache
        start = int(cache.lengths[0])
        cache.make_room(rows)
        self.store, self.pages, self.lengths = cache.store, cache.pages, cache.lengths
        self.mine, self.positions = cache.pages.written_from, cache.slot_positions.held
        self._slots = min(self.mine[1], self.positions.shape[1]) if start >= self.mine[0] else 0

    def missing(self, rows: int) -> int:
        """How many pages of each layer and head make room for `rows` more rows, of what is `unchanged`.

        What `describe` has written stays right. 0 where it takes more than pages, see `open`.
        """
        end = self.cache.next_position + self.cache.prefix + rows
        count = -(-end // SLOTS) - self._slots // SLOTS
        if self._slots != self.mine[1] or not self.pages.appends(count):
            return 0
        return count if self._slots + count * SLOTS <= self.positions.shape[1] else 0

    def describe(self, struct: SegmentStruct) -> object:
        """Write where the kernel finds the cache; returns what must be kept meanwhile."""
        pool, table = self.pages.pool, self.pages.whole_table
        assert isinstance(pool, MappedPool)
        _, kv_heads, columns = table.shape
        struct.base, struct.page_bytes, struct.element = pool.base, pool.page_bytes, ELEMENTS[pool.dtype]
        struct.pages, struct.table_pages = address(table, np.int32, None, kv_heads, columns), columns
        struct.table_layer, struct.table_head = kv_heads * columns, columns
        struct.lengths, struct.lengths_layer = address(self.lengths, np.int64, None), 1
        struct.slots = address(self.positions, np.int32, *self.positions.shape, apart=True)
        struct.slots_layer = struct.slots_head = struct.lengths_head = struct.stays = 0
        struct.starts = struct.picked = struct.weights = struct.mass = struct.mask = None
        return table, self.lengths, self.positions, pool

    def keep(self, rows: int) -> None:
        """Note that a kernel has made content of `rows` more rows."""
        self.cache.next_position += rows

    def settle(self, rows: Sequence[int]) -> None:
        """Make content of these tentative rows, which a pass has written; `keep` notes how many."""
        stands = self.cache.next_position
        self.cache.keep(rows)
        self.cache.next_position = stands

    def cut(self, rows: int) -> None:
        """Forget the last `rows` rows of the content, which the kernel has just made."""
        self.lengths -= rows
        self.cache.next_position -= rows


def append(every: Sequence[OpenRows], counts: Sequence[int]) -> None:
    """Take so many pages for each layer and head of each text, all of them at once.

    Where there is no memory nothing changes.

    Args:
        every: The rows of texts of one model, in one pool.
        counts: [texts] what is `missing`.
    """
    pages.append([rows.pages for rows in every], counts)
    for rows in every:
        rows.mine = rows.pages.written_from
        rows._slots = rows.mine[1]
