"""A limit on the memory of pages, which no cache made within it exceeds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import torch

    from .page_pool import PagePool

Key = tuple[int, "torch.dtype", "torch.device"]


class MemoryLimit:
    """What the pages of all caches made `within` it may take together.

    These caches, and side stores of their policies, have pools of their own. A page that would exceed the limit is
    refused.

    Attributes:
        most: Bytes that may be used.
        beside: Bytes that policies and models hold outside of pages, as last counted.
        reserved: Bytes that passes need for a short time, for which pages leave room.
        peak: The most bytes that pages have taken.
        pools: The pools, by elements of a row, dtype and device.
        lock: Of all these pools.
    """

    def __init__(self, most: int, give_back: Callable[[], bool] = lambda: False) -> None:
        """Begin with nothing.

        Args:
            most: Bytes that may be used.
            give_back: Frees memory that is kept for later use; False where there is none.
        """
        self.most, self.beside, self.reserved, self.peak = most, 0, 0, 0
        self.pools: WeakValueDictionary[Key, PagePool] = WeakValueDictionary()
        self.lock = threading.Lock()
        self._give_back = give_back

    @property
    def used(self) -> int:
        """Bytes of all pages in use, and of what is stored beside them."""
        return self._pages() + self.beside

    def allows(self, more: int) -> bool:
        """Whether so many bytes of further pages fit; they count towards `peak` then."""
        pages = self._pages() + more
        if pages + self.beside + self.reserved > self.most:
            return False
        self.peak = max(self.peak, pages)
        return True

    def settle(self) -> None:
        """Free what was dropped meanwhile; the lock is held."""
        for pool in list(self.pools.values()):
            pool.settle()

    def attempts(self) -> Iterator[None]:
        """One turn for each try to take pages, each after more memory was given back."""
        yield
        while self._give_back():
            yield

    def collect(self) -> bool:
        """Free pages of caches that only cycles of references hold; whether there were some.

        It takes as long as several passes, so it is what is tried last.
        """
        before = self.used
        gc.collect()
        with self.lock:
            self.settle()
        return self.used < before

    @contextmanager
    def within(self) -> Iterator[None]:
        """Caches that are made in this block, by this thread, count here."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def _pages(self) -> int:
        return sum(pool.used * pool.page_bytes for pool in list(self.pools.values()))


_current: ContextVar[MemoryLimit | None] = ContextVar("memory_limit", default=None)


def current_limit() -> MemoryLimit | None:
    """The limit that caches made now are under, None for none."""
    return _current.get()
