"""Which pages hold the slots of one text: a table per layer and key-value head; forks share pages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from decodery.core.errors import OutOfMemory

from .page_pool import SHORTER, SLOTS, PagePool, pool_of

NO_PAGE = -1


class PageTable:
    """The pages of one text.

    A text takes a page when a slot of it is to be written, and copies it first where others hold it too. Pages that are
    taken together lie one after another in each layer and head.

    Attributes:
        pool: Where the pages are.
        version: Grows whenever the address of the table changes.
        changes: Grows whenever the table holds other pages.
        windowed: Layers whose rows stop seeing old slots.
        passed: How many of the first pages they no longer hold.
        written_from: Slots that are known to be this text's to write, in all layers: another tuple once that may have
            changed.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, windowed: Sequence[int] = ()
    ) -> None:
        """A text of no slots.

        Args:
            shape: Layers, kv_heads, elements of a row: head_dim, and more where rows are coded.
            dtype, device: Of the rows.
            windowed: See the class.
        """
        layers, kv_heads, row = shape
        self.nothing = torch.empty((layers, 2, kv_heads, 0, row), dtype=dtype, device=device)
        self.pool: PagePool = pool_of(row, dtype, device)
        self.windowed, self.passed, self.version, self.changes = tuple(windowed), 0, 0, 0
        self._room = np.full((layers, kv_heads, 4), NO_PAGE, dtype=np.int32)
        self._columns = 0
        self._held: np.ndarray | None = None
        self.written_from = 0, 0

    @property
    def table(self) -> np.ndarray:
        """[layers, kv_heads, pages] int32, to be read only; `NO_PAGE` where there is none."""
        return self._room[:, :, : self._columns]

    @property
    def whole_table(self) -> np.ndarray:
        """The same with room for more pages, one after another in memory."""
        return self._room

    @property
    def capacity(self) -> int:
        """Slots before the end of the last page of any layer."""
        return self._columns * SLOTS

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values that one slot takes in all layers."""
        layers, _, kv_heads, _, _ = self.nothing.shape
        return layers * kv_heads * self.pool.page_bytes // SLOTS

    @property
    def held(self) -> np.ndarray:
        """[n] int32, all pages that it holds."""
        if self._held is None:
            table = self.table
            self._held = table[table >= 0]
        return self._held

    @property
    def shared(self) -> bool:
        """Whether other texts hold some of its pages."""
        return bool((self.pool.holders[self.held] > 1).any())

    def read(self, start: int, stop: int, layers: int | slice = slice(None)) -> torch.Tensor:
        """A copy of slots [start, stop): [layers, 2, kv_heads, n, row]; zeros where there is no page."""
        one = isinstance(layers, int)
        tables = self._room[layers : layers + 1] if isinstance(layers, int) else self._room[layers]
        found = self.pool.read(tables, range(start, max(start, min(stop, self.capacity))))
        return found[0] if one else found

    def take(self, slots: np.ndarray, layers: Sequence[int] | None = None, head: int | None = None) -> torch.Tensor:
        """Copies of these slots of some layers, and of all heads or one: [layers, 2, kv_heads, m, row]."""
        return self.pool.read(self._tables(layers, head), slots)

    def put(self, start: int, data: torch.Tensor, layers: Sequence[int] | None = None, head: int | None = None) -> None:
        """Write `data` [layers, 2, kv_heads, m, row] to the slots from `start` on of these layers and heads."""
        self.pool.write(self._tables(layers, head), range(start, start + data.shape[3]), data)

    def move(self, slots: np.ndarray, start: int, layers: Sequence[int]) -> None:
        """Let the slots from `start` on of these layers be what these slots are, all of which have pages."""
        self.pool.move(self._tables(layers, None), slots, start)

    def own(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Let slots [start, stop) of every layer be there, and this text's alone to write.

        Where there is no memory nothing changes.

        Args:
            starts, stops: [layers] or [layers, kv_heads].
        """
        first, last = int(starts.min()), int(stops.max())
        if self.written_from[0] <= first and last <= self.written_from[1]:
            return
        begin, end = first // SLOTS, -(-last // SLOTS)
        if end <= begin:
            return
        if end - begin > self.pool.most:
            size = (last - first) * self.slot_bytes / 2**30
            raise OutOfMemory(f"no memory for a key-value cache of {last} tokens ({size:.1f} GiB): {SHORTER}")
        self.widen(end)
        span = self._room[:, :, begin:end]
        shared, needed = self._wanting(span, begin, starts, stops)
        if count := int(np.count_nonzero(needed)):
            try:
                pages = self.pool.take(count)
            except OutOfMemory as error:
                size = count * self.pool.page_bytes / 2**30
                raise OutOfMemory(
                    f"no memory for a key-value cache of {last} tokens ({size:.1f} GiB more): {SHORTER}"
                ) from error
            old, new = span[shared], pages[shared[needed]]
            if len(old):
                self.pool.copy(old, new)
                self.pool.drop(old)
            span[needed] = pages
            self._held = None
            self.changes += 1
        self._columns = max(self._columns, end)
        # Pages are owned as a whole.
        self.written_from = int(starts.max()) // SLOTS * SLOTS, -(-int(stops.min()) // SLOTS) * SLOTS

    def widen(self, columns: int) -> None:
        """Have room in the table for so many pages."""
        if columns > (held := self._room.shape[2]):
            wider = np.full((*self._room.shape[:2], max(columns, 2 * held)), NO_PAGE, dtype=np.int32)
            wider[:, :, :held] = self._room
            self._room = wider
            self.version += 1

    def wanting(self, starts: np.ndarray, stops: np.ndarray) -> int:
        """How many pages `own` would take."""
        begin, end = int(starts.min()) // SLOTS, -(-int(stops.max()) // SLOTS)
        if end <= begin:
            return 0
        span = np.full((*self._room.shape[:2], end - begin), NO_PAGE, dtype=np.int32)
        there = self._room[:, :, begin:end]
        span[:, :, : there.shape[2]] = there
        return int(np.count_nonzero(self._wanting(span, begin, starts, stops)[1]))

    def _wanting(
        self, span: np.ndarray, begin: int, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which pages of a part of the table, from page `begin` on, have to be copied, and which to be taken."""
        columns = np.arange(begin, begin + span.shape[2])
        wanted = (columns >= _by_head(starts // SLOTS)) & (columns < _by_head(-(-stops // SLOTS)))
        there = span >= 0
        shared = wanted & there
        shared[shared] = self.pool.holders[span[shared]] > 1
        return shared, shared | (wanted & ~there)

    def appends(self, pages: int) -> bool:
        """Whether so many pages more in every layer and head are all that it takes to write there."""
        return self.written_from[1] == self._columns * SLOTS and self._columns + pages <= self._room.shape[2]

    def trim(self, stops: np.ndarray) -> None:
        """Give back the pages that begin at slot `stop` of each layer or later.

        Args:
            stops: [layers] or [layers, kv_heads].
        """
        table = self.table
        gone = (np.arange(self._columns) >= _by_head(-(-stops // SLOTS))) & (table >= 0)
        self._give_back(table, gone)
        held = np.flatnonzero((table >= 0).any(axis=(0, 1)))
        self._columns = int(held[-1]) + 1 if len(held) else 0

    def fork(self, lengths: np.ndarray) -> PageTable:
        """A text that shares the first slots, so many of each layer.

        Args:
            lengths: [layers] or [layers, kv_heads].
        """
        clone = object.__new__(PageTable)
        clone.nothing, clone.pool, clone.windowed = self.nothing, self.pool, self.windowed
        clone.version = clone.changes = 0
        clone._held = None
        clone._columns = min(-(-int(lengths.max(initial=0)) // SLOTS), self._columns)
        clone._room = self._room[:, :, : max(clone._columns, 1)].copy()
        clone._room[np.arange(clone._room.shape[2]) >= _by_head(-(-lengths // SLOTS), clone._room)] = NO_PAGE
        clone.passed = min(self.passed, clone._columns)
        clone.written_from = self.written_from = 0, 0
        self.pool.share(clone.held)
        return clone

    def release(self) -> None:
        """Hold nothing any more."""
        self.pool.drop(self.held)
        self._room.fill(NO_PAGE)
        self._columns, self.written_from, self._held = 0, (0, 0), None
        self.changes += 1

    def release_passed(self, slot: int) -> None:
        """Give back the pages of windowed layers that end before `slot`."""
        last = max(slot // SLOTS, self.passed)
        if self.windowed and last > self.passed:
            table = self.table
            gone = np.zeros(table.shape, dtype=np.bool_)
            gone[list(self.windowed), :, self.passed : last] = True
            self._give_back(table, gone & (table >= 0))
        self.passed = last

    def begin_anew(self) -> None:
        """All slots will be written again, so that windowed layers need all of them."""
        self.passed, self.written_from = 0, (0, 0)

    def _give_back(self, table: np.ndarray, gone: np.ndarray) -> None:
        if gone.any():
            pages = table[gone]
            table[gone] = NO_PAGE
            self.written_from, self._held = (0, 0), None
            self.changes += 1
            self.pool.drop(pages)

    def _tables(self, layers: Sequence[int] | None, head: int | None) -> np.ndarray:
        tables = self._room if layers is None else self._room[list(layers)]
        return tables if head is None else tables[:, head : head + 1]

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process all memory goes, and what dropping pages needs may be gone.
        if hasattr(self, "written_from") and not ending():
            self.pool.drop(self.held)


def append(texts: Sequence[PageTable], counts: Sequence[int]) -> None:
    """Take so many pages for each text, after its last one in every layer and head, all of them at once.

    Where there is no memory nothing changes.

    Args:
        texts: Those of one pool and shape, each of which `appends` so many.
        counts: [texts] pages of one layer and head.
    """
    layers, kv_heads, _ = texts[0].whole_table.shape
    pool = texts[0].pool
    assert all(text.pool is pool for text in texts), "a page's number says nothing in another pool"
    pages, end = pool.take(layers * kv_heads * sum(counts)), 0
    for text, count in zip(texts, counts, strict=True):
        first, begin, end = text._columns, end, end + layers * kv_heads * count
        text._room[:, :, first : first + count] = pages[begin:end].reshape(layers, kv_heads, count)
        text._columns, text._held = first + count, None
        text.written_from = text.written_from[0], (first + count) * SLOTS
        text.changes += 1


def resident(texts: Iterable[PageTable]) -> int:
    """Bytes of the pages that these texts hold together; a page that several hold counts once."""
    held: dict[int, tuple[PagePool, list[np.ndarray]]] = {}
    for text in texts:
        held.setdefault(id(text.pool), (text.pool, []))[1].append(text.held)
    return sum(_distinct(pages) * pool.page_bytes for pool, pages in held.values())


def _distinct(pages: list[np.ndarray]) -> int:
    """How many different pages there are."""
    if len(pages) == 1:
        return len(pages[0])
    every = np.concatenate(pages)
    seen = np.zeros(int(every.max(initial=-1)) + 1, dtype=np.bool_)
    seen[every] = True
    return int(np.count_nonzero(seen))


def _by_head(numbers: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
    """[layers] or [layers, kv_heads] as [layers, 1 or kv_heads, 1]; as wide as `like` where that is given."""
    wide = numbers.reshape(len(numbers), -1, 1)
    return wide if like is None else np.broadcast_to(wide, (*like.shape[:2], 1))
