"""What requests take of a server, counted from their arrival to their end: by request, by key, and of all together."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from decodery.core.fair_slots import FairOrder, caller
from decodery.core.ledger import Ledger, charging

from .errors import invalid, overloaded, stopping
from .settings import ServerSettings

T = TypeVar("T")

OWNER_PART = 0.75
"""Of the places and of the memory, what one key takes at most where there are several."""
PREPARED = 64
"""Requests of one key that are read, or whose grammars are compiled, at a time, those that wait included."""


class Admission:
    """The texts that requests have at a time: prompts, `n`, branches of searches.

    Each counts once per model that reads it. Safe to share between threads.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._open = Counter[str]()

    @property
    def most(self) -> int:
        """Texts of all requests together."""
        return self._settings.max_running + self._settings.max_queue

    @property
    def total(self) -> int:
        """Texts that are in progress or wait."""
        with self._lock:
            return self._open.total()

    def enter(self, owner: str, texts: int, *, search: bool, patience: int) -> None:
        """Count the texts of a request.

        Args:
            owner: The key it came with.
            texts: How many it has at a time.
            search: Whether a search follows them.
            patience: Seconds after which it may be made again.

        Raises:
            ApiError: If there is no room for them.
        """
        settings = self._settings
        if texts > settings.max_texts and search:
            raise invalid(
                f"the search of this request follows {texts} texts at a time, and one request may have "
                f"{settings.max_texts}: give it fewer",
                "decodery.search",
            )
        if texts > settings.max_texts:
            raise invalid(
                f"this request needs {texts} texts, and one may ask for {settings.max_texts}: ask for fewer", "n"
            )
        if texts > (allowed := min(self.most, settings.max_texts_per_key)):
            raise invalid(
                f"this request needs {texts} texts at a time, and at most {allowed} can wait here: ask for fewer"
            )
        with self._lock:
            if self._open.total() + texts > self.most:
                raise overloaded(f"{self._open.total()} texts are in progress or wait, which is all that may", patience)
            if self._open[owner] + texts > settings.max_texts_per_key:
                raise overloaded(
                    f"this key has {self._open[owner]} texts in progress; it may have {settings.max_texts_per_key}"
                )
            self._open[owner] += texts

    def leave(self, owner: str, texts: int) -> None:
        """These are over."""
        with self._lock:
            self._open[owner] -= texts
            self._open += Counter()  # drops keys without a text


class FairThreads:
    """Runs what is done for requests before they reach the engine, on threads that keys take in turn.

    Args:
        threads: How many.
        name: Of the threads.
        seconds: Of compiling and the like for one request.
        most: Requests of one key that wait or run at a time.
        spare: Threads that one key leaves to others.
    """

    def __init__(self, threads: int, name: str, seconds: float, most: int = PREPARED, spare: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._order, self._most = FairOrder(threads, spare), most
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Future[Any], Callable[[], None]]] = []
        self._seconds = seconds

    async def run(self, what: Callable[[], T]) -> T:
        """The result of a function, for the key in whose request this is called. Cancelled, it is not begun.

        Raises:
            ApiError: If the key has too many of them waiting.
        """
        own, found = caller.get(), Future[T]()

        def work() -> None:
            if not found.set_running_or_notify_cancel():
                return
            caller.set(own)
            try:
                with charging(Ledger(side_limit=self._seconds)):
                    found.set_result(what())
            except BaseException as error:
                found.set_exception(error)

        with self._lock:
            if sum(each == own for each, _, _ in self._waiting) + self._order.running[own] >= self._most:
                raise overloaded(f"this key has {self._most} requests that are being read; send them after each other")
            self._waiting.append((own, found, work))
        self._start()
        try:
            return await asyncio.wrap_future(found)
        except asyncio.CancelledError:
            if found.cancel():
                with self._lock:
                    self._waiting = [each for each in self._waiting if each[1] is not found]
            raise

    def close(self) -> None:
        """End the threads once they are done; what waits is not begun, and its requests hear that."""
        with self._lock:
            left, self._waiting = self._waiting, []
        for _, found, _ in left:
            if found.set_running_or_notify_cancel():
                found.set_exception(stopping())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Begin what there is a thread for."""
        while (begun := self._next()) is not None:
            own, work = begun
            # A slot is held until its thread is done, even if the request was cancelled.
            self._pool.submit(work).add_done_callback(lambda _, own=own: self._end(own))  # type: ignore[misc]

    def _next(self) -> tuple[str, Callable[[], None]] | None:
        with self._lock:
            owners = [each for each, _, _ in self._waiting]
            if (own := self._order.next(owners)) is None:
                return None
            _, _, work = self._waiting.pop(owners.index(own))
            self._order.begin(own, owners)
            return own, work

    def _end(self, own: str) -> None:
        with self._lock:
            self._order.end(own)
        self._start()
