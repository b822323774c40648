"""Pages of key-value memory: 16 slots of one layer and one key-value head each, all from one pool per kind of row."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import numpy as np
import torch

from decodery.core.abstract import Contract
from decodery.core.errors import OutOfMemory
from decodery.core.machine import usable_memory
from decodery.core.mapped_memory import anonymous, discard
from decodery.core.native.kernels import address, library
from decodery.core.native.structs import LostStruct, PageRowsStruct

from . import coded
from .device_tables import DeviceTables
from .memory_limit import current_limit

SLOTS = 16
"""Slots of a page."""
SLAB = 2 << 20
"""Bytes that go back to the system together, once all pages in them are free."""
SHORTER = "use a shorter prompt or fewer sequences at once"
_FIRST = 16 << 20
_OF_CARD = 64
"""A pool begins with this part of a card's memory: when it moves, all graphs over it are captured anew."""
_MOST_PAGES = 2**31 - 1
_WITHOUT_LIMIT = 64 << 30


class PagePool(Contract):
    """Pages, their holders, and which of them are free.

    Attributes:
        row: Elements of a row of keys or of values.
        page_bytes: From one page to the next.
        used: Pages that texts hold.
        generation: Grows whenever the pages' addresses change.
        holders: [pages] how many texts hold each of them.
        lock: Held while pages are taken or move; that of the limit where there is one.
    """

    def __init__(self, row: int, dtype: torch.dtype, device: torch.device, size: int) -> None:
        self.row, self.dtype, self.device = row, dtype, device
        self.page_bytes = page_bytes(row, dtype)
        self.most = max(min(size // self.page_bytes, _MOST_PAGES), 1)
        self.used = self.generation = self._top = 0
        self.holders = np.zeros(self.most, dtype=np.int32)
        self._free: list[np.ndarray] = []
        self._dropped: deque[np.ndarray] = deque()
        self.limit = current_limit()
        self.lock = threading.Lock() if self.limit is None else self.limit.lock

    def take(self, count: int) -> np.ndarray:
        """[count] int32, free pages, one after another as far as possible.

        Raises:
            OutOfMemory: If there are not so many, or the limit does not allow them; then none are taken.
        """
        if self.limit is None:
            return self._take(count)
        refused = _no_memory(count * self.page_bytes)
        for _ in self.limit.attempts():
            try:
                return self._take(count)
            except OutOfMemory as error:
                refused = error
        try:
            raise refused
        finally:
            # This frame and the error's traceback would hold each other, and all caches of the callers' frames.
            del refused

    def _take(self, count: int) -> np.ndarray:
        with self.lock:
            self.settle()
            if self.limit is not None and not self.limit.allows(count * self.page_bytes):
                self.limit.settle()
                if not self.limit.allows(count * self.page_bytes):
                    raise _no_memory(count * self.page_bytes)
            found, missing = [], count
            while missing and self._free:
                last = self._free.pop()
                if len(last) > missing:
                    self._free.append(last[missing:])
                found.append(last[:missing])
                missing -= len(found[-1])
            try:
                if missing:
                    self._extend(self._top + missing)
                    found.append(np.arange(self._top, self._top + missing, dtype=np.int32))
                    self._top += missing
            except OutOfMemory:
                self._free.extend(reversed(found))
                raise
            pages = found[0] if len(found) == 1 else np.concatenate([np.zeros(0, dtype=np.int32), *found])
            self.holders[pages] = 1
            self.used += count
            self._commit(pages)
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more text holds these pages, each of them once."""
        with self.lock:
            self.settle()
            self.holders[pages] += 1

    def drop(self, pages: np.ndarray) -> None:
        """One text less holds these pages, each of them once; pages without a holder are free."""
        self._dropped.append(pages)
        self._settle_if_free()

    def _settle_if_free(self) -> None:
        # Garbage collection may come by while this thread holds the lock: they are settled later.
        if self.lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self.lock.release()

    @abstractmethod
    def read(self, tables: np.ndarray, slots: range | np.ndarray) -> torch.Tensor:
        """Rows [layers, 2, kv_heads, n, row] of these slots of tables [layers, kv_heads, pages].

        Zeros where there is no page.
        """

    @abstractmethod
    def write(self, tables: np.ndarray, slots: range | np.ndarray, rows: torch.Tensor) -> None:
        """Put rows [layers, 2, kv_heads, n, row] into these slots of tables [layers, kv_heads, pages]."""

    def move(self, tables: np.ndarray, slots: np.ndarray, to: int) -> None:
        """Put the rows of these slots of tables [layers, kv_heads, pages] into those from `to` on."""
        self.write(tables, range(to, to + len(slots)), self.read(tables, slots))

    @abstractmethod
    def copy(self, pages: np.ndarray, to: np.ndarray) -> None:
        """Copy whole pages [n] to others [n]."""

    def _extend(self, pages: int) -> None:
        """Have memory for so many pages."""
        if pages > self.most:
            raise _no_memory(pages * self.page_bytes)

    def _commit(self, pages: np.ndarray) -> None:
        """These pages will be written to."""

    def _discard(self, pages: np.ndarray) -> None:
        """These pages are free."""

    def settle(self) -> None:
        """Free the pages that were dropped and have no holder; the lock is held."""
        while self._dropped:
            pages = self._dropped.popleft()
            self.holders[pages] -= 1
            free = pages[self.holders[pages] == 0]
            if len(free):
                self.used -= len(free)
                self._free.append(free)
                self._discard(free)


class MappedPool(PagePool):
    """A range of addresses whose memory comes when it is written to; kernels read and write it."""

    def __init__(self, row: int, dtype: torch.dtype, device: torch.device, size: int) -> None:
        super().__init__(row, dtype, device, size)
        # Whole slabs, and one more to begin where a slab does: what is given back must be this pool's alone.
        self._memory = _reserved((-(-self.most * self.page_bytes // SLAB) + 1) * SLAB)
        self.most = min(self.most, (len(self._memory) // SLAB - 1) * SLAB // self.page_bytes)
        self.holders = self.holders[: self.most]
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.base = -(-begin // SLAB) * SLAB
        self._uses = np.zeros(self.most * self.page_bytes // SLAB + 1, dtype=np.int32)

    def read(self, tables: np.ndarray, slots: range | np.ndarray) -> torch.Tensor:
        layers, kv_heads, _ = tables.shape
        rows = torch.empty(layers, 2, kv_heads, len(slots), self.row, dtype=self.dtype, device="cpu")
        self._call("decodery_read_rows", tables, slots, rows)
        return rows

    def write(self, tables: np.ndarray, slots: range | np.ndarray, rows: torch.Tensor) -> None:
        self._call("decodery_write_rows", tables, slots, rows.contiguous())

    def copy(self, pages: np.ndarray, to: np.ndarray) -> None:
        lib = library()
        assert lib is not None
        old, new = (address(np.ascontiguousarray(each), np.int32, None) for each in (pages, to))
        lib.decodery_copy_pages(self.base, self.page_bytes, old, new, len(pages))

    def lose(
        self,
        tables: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        positions: np.ndarray,
        worths: np.ndarray,
        changed: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Take slots out of heads, and move up what lies after them: see `Lost` in csrc/abi.h.

        Args:
            tables: [layers, kv_heads, pages].
            slots: [layers, kv_heads, n] int32, ascending; those from a layer's length on stand for none.
            lengths: [layers] int64.
            positions: [layers, slots] int32 of slots, which become the latest of their heads'.
            worths: [layers, kv_heads, slots] float64 of slots, which move likewise.
            changed: Slots [layers, kv_heads, m] int32, -1 for none, that hold other rows before that, and these rows
                [layers, kv_heads, m, 2 (keys, values), bytes] uint8.
        """
        lib = library()
        assert lib is not None
        layers, kv_heads, pages = tables.shape
        row_bytes = self.row * self.dtype.itemsize
        struct = LostStruct(
            self.base, address(tables, np.int32, layers, kv_heads, pages),
            address(slots, np.int32, layers, kv_heads, slots.shape[2]), address(lengths, np.int64, layers),
            address(positions, np.int32, layers, None), address(worths, np.float64, layers, kv_heads, None),
            self.page_bytes, row_bytes, positions.shape[1], worths.shape[2], layers, kv_heads,
            pages, slots.shape[2], self.dtype.itemsize,
        )  # fmt: skip
        if changed is not None:
            shape = layers, kv_heads, changed[0].shape[2]
            struct.targets, struct.merged_count = address(changed[0], np.int32, *shape), shape[2]
            struct.merged = address(changed[1], np.uint8, *shape, 2, row_bytes)
        lib.decodery_lose_slots(ctypes.addressof(struct))

    def _call(self, kernel: str, tables: np.ndarray, slots: range | np.ndarray, rows: torch.Tensor) -> None:
        lib, tables = library(), np.ascontiguousarray(tables)
        assert lib is not None
        chosen = None if isinstance(slots, range) else np.ascontiguousarray(slots, dtype=np.int32)
        layers, kv_heads, pages = tables.shape
        if len(slots) and not 0 <= min(slots[0], slots[-1]) <= max(slots) < pages * SLOTS:
            raise IndexError(f"slots up to {max(slots)} are not among {pages} pages")
        struct = PageRowsStruct(
            self.base, address(tables, np.int32, layers, kv_heads, pages),
            None if chosen is None else address(chosen, np.int32, len(slots)),
            address(rows, self.dtype, layers, 2, kv_heads, len(slots), self.row), self.page_bytes,
            self.row * self.dtype.itemsize, len(slots), slots.start if isinstance(slots, range) else 0,
            layers, kv_heads, pages, self.dtype.itemsize,
        )  # fmt: skip
        getattr(lib, kernel)(ctypes.addressof(struct))

    def _slabs(self, pages: np.ndarray) -> np.ndarray:
        """The slabs in which pages lie, a page in two of them where it ends in the next one."""
        first = pages.astype(np.int64) * self.page_bytes
        begin, end = first // SLAB, (first + self.page_bytes - 1) // SLAB
        found: np.ndarray = np.concatenate((begin, end[end != begin]))
        return found

    def _commit(self, pages: np.ndarray) -> None:
        np.add.at(self._uses, self._slabs(pages), 1)

    def _discard(self, pages: np.ndarray) -> None:
        slabs = self._slabs(pages)
        np.subtract.at(self._uses, slabs, 1)
        for slab in np.unique(slabs[self._uses[slabs] == 0]).tolist():
            discard(self.base + slab * SLAB, self.base + (slab + 1) * SLAB)


class TensorPool(PagePool):
    """One tensor [2 (keys, values), pages, SLOTS, row] on any device.

    Rows that are coded lie apart in their page: all numbers, then all scales, so that numbers begin at even addresses.
    `data` is [2, pages, SLOTS * row] then.

    On the CPU it is a range of addresses whose memory comes when it is written to. Elsewhere it moves when it grows: by
    a half, so that several pools under a limit do not take all of it each, and after a quarter to what others leave of
    it. Several that grow by halves may have room for more than the limit, of which it is the pages in use.
    """

    def __init__(self, row: int, dtype: torch.dtype, device: torch.device, size: int) -> None:
        super().__init__(row, dtype, device, size)
        self._tables: dict[tuple[int, int], DeviceTables] = {}
        self.beside = coded.beside(dtype)
        self._page = (SLOTS * row,) if self.beside else (SLOTS, row)
        self.data = torch.zeros(2, 0, *self._page, dtype=dtype, device=device)
        if device.type == "cpu" and sys.platform != "win32":
            one = 2 * SLOTS * row * dtype.itemsize
            memory = _reserved(self.most * one)
            self.most = min(self.most, len(memory) // one)
            self.holders = self.holders[: self.most]
            numbers = torch.frombuffer(memory, dtype=dtype, count=self.most * one // dtype.itemsize)
            self.data = numbers.view(2, self.most, *self._page)

    def read(self, tables: np.ndarray, slots: range | np.ndarray) -> torch.Tensor:
        pages, rows = self._places(tables, slots)
        found = self.rows(pages.clamp(min=0), rows)
        # What is hidden weighs nothing, but nothing times a number that is none is none.
        found = torch.where(pages[..., None] < 0, torch.zeros((), dtype=self.dtype, device=self.device), found)
        return found.transpose(0, 1)

    def write(self, tables: np.ndarray, slots: range | np.ndarray, rows: torch.Tensor) -> None:
        pages, places = self._places(tables, slots)
        with self.still():
            self.put(pages, places, rows.transpose(0, 1))

    def move(self, tables: np.ndarray, slots: np.ndarray, to: int) -> None:
        # Where rows lie and where they go is brought by one copy.
        chosen = np.concatenate((slots, np.arange(to, to + len(slots))))
        pages = tables[:, :, chosen // SLOTS]
        there = self._index(np.concatenate((pages.reshape(-1), chosen % SLOTS)))
        places, offsets = there[: pages.size].view(pages.shape), there[pages.size :]
        n = len(slots)
        with self.still():
            self.put(places[..., n:], offsets[n:], self.rows(places[..., :n], offsets[:n]))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Views of numbers [2, pages, SLOTS, dim], and of scales [2, pages, SLOTS, beside] of coded rows."""
        if not self.beside:
            return (self.data,)
        dim = self.row - self.beside
        numbers, scales = self.data.split([SLOTS * dim, SLOTS * self.beside], dim=2)
        return numbers.unflatten(2, (SLOTS, dim)), scales.unflatten(2, (SLOTS, self.beside))

    def rows(self, pages: torch.Tensor, offsets: torch.Tensor | slice) -> torch.Tensor:
        """[2, ..., row] what lies at offsets of pages, as tensors are indexed by both."""
        found = [part[:, pages, offsets] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def put(self, pages: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [2, ..., row] there."""
        first = 0
        for part in self.parts:
            part[:, pages, offsets] = rows[..., first : first + part.shape[3]]
            first += part.shape[3]

    def copy(self, pages: np.ndarray, to: np.ndarray) -> None:
        old, new = (self._index(each) for each in (pages, to))
        with self.still():
            self.data[:, new] = self.data[:, old]

    def tables(self, layers: int, kv_heads: int) -> DeviceTables:
        """The tables of texts with so many layers and key-value heads, on the pool's device."""
        known = self._tables.get((layers, kv_heads))
        if known is None:
            # Rows that only fill up a pass read and write a page that no text holds.
            fresh = DeviceTables(layers, kv_heads, self.device, int(self.take(1)[0]))
            known = self._tables.setdefault((layers, kv_heads), fresh)
        return known

    @contextmanager
    def still(self) -> Iterator[None]:
        """Within it, pages keep their addresses: another thread that needs more waits."""
        with self.lock:
            yield
        self._settle_if_free()

    def _commit(self, pages: np.ndarray) -> None:
        # What another text left there may be no number.
        self.data[:, self._index(pages)] = 0

    def _index(self, numbers: np.ndarray) -> torch.Tensor:
        """Numbers on the pool's device, which nothing waits for."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self.device, non_blocking=True)

    def _places(self, tables: np.ndarray, slots: range | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages [layers, kv_heads, n] and rows in them [n] of slots."""
        chosen = np.asarray(slots, dtype=np.int64)
        return self._index(tables[:, :, chosen // SLOTS]), self._index(chosen % SLOTS)

    def _zeros(self, pages: int) -> torch.Tensor:
        try:
            return self.data.new_zeros(2, pages, *self._page)
        except (RuntimeError, MemoryError) as error:
            raise _no_memory(pages * self.page_bytes) from error

    def _others(self) -> Iterator[TensorPool]:
        """The pools that share its limit."""
        every = () if self.limit is None else self.limit.pools.values()
        others = (each for each in every if isinstance(each, TensorPool) and each is not self)
        return (each for each in others if each.device == self.device)

    def _extend(self, pages: int) -> None:
        super()._extend(pages)
        held = self.data.shape[1]
        if pages <= held:
            return
        room = max(pages, held + held // 2, min(_first(self.device) // self.page_bytes, self.most // 8))
        if self.limit is not None and 4 * room > self.most:
            # What moves lies there twice: later there would be no room beside it for all that the limit allows.
            others = sum(each.data.shape[1] * each.page_bytes for each in self._others())
            room = max(room, (self.limit.most - others) // self.page_bytes)
        try:
            wider = self._zeros(min(room, self.most))
        except OutOfMemory:
            # There may be room for what is needed now, and some more, so that it does not move for every page.
            wider = self._zeros(min(pages + held // 8, self.most))
        wider[:, :held] = self.data
        self.data = wider
        self.generation += 1


_pools: WeakValueDictionary[tuple[int, torch.dtype, torch.device], PagePool] = WeakValueDictionary()
_making = threading.Lock()


def pool_of(row: int, dtype: torch.dtype, device: torch.device | str) -> PagePool:
    """The pool of all texts with such rows under one limit: of kernels on the CPU, of PyTorch elsewhere."""
    device, limit = torch.device(device), current_limit()
    pools = _pools if limit is None else limit.pools
    with _making:
        if (known := pools.get((row, dtype, device))) is not None:
            return known
        kind = MappedPool if device.type == "cpu" and library() is not None else TensorPool
        most = _memory_of(device)
        pools[row, dtype, device] = pool = kind(row, dtype, device, most if limit is None else min(most, limit.most))
        return pool


def page_bytes(row: int, dtype: torch.dtype) -> int:
    """Bytes of a page with rows of so many elements, in multiples of 16, as csrc/pages.h lays it out."""
    beside = coded.beside(dtype)
    numbers = -(-(row - beside) // SLOTS) * SLOTS
    return 2 * SLOTS * (numbers + beside) * dtype.itemsize


def _first(device: torch.device) -> int:
    """Bytes that a pool on a device has at first."""
    return max(_FIRST, _memory_of(device) // _OF_CARD) if device.type == "cuda" else _FIRST


def _memory_of(device: torch.device) -> int:
    """Bytes of memory that may be used on a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    found = usable_memory() if device.type == "cpu" else None
    return _WITHOUT_LIMIT if found is None else found


def _reserved(size: int) -> mmap.mmap:
    """Addresses of so many bytes, or of fewer where the system has not so many to give."""
    if sys.platform == "win32":
        # They count as memory there, touched or not.
        size = min(size, max(_memory_of(torch.device("cpu")) // 4, 32 * SLAB))
    while True:
        try:
            return anonymous(size)
        except OSError as error:
            if size <= 32 * SLAB:
                raise _no_memory(size) from error
            size //= 2


def _no_memory(size: int) -> OutOfMemory:
    return OutOfMemory(f"no memory for {size / 2**30:.1f} GiB of keys and values: {SHORTER}")
