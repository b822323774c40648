"""Turns of callers: at most so many jobs at a time, divided fairly among those whom they are for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic

from .ledger import charged

caller: ContextVar[str] = ContextVar("caller", default="")
"""Whom this thread works for: the owner of a request. Slots are divided among callers."""


class FairOrder:
    """Who is next: the caller with the fewest jobs in progress.

    Of equals it is the one that was served longest ago. One caller leaves some slots free, so that another
    finds one or waits for a single job.

    Args:
        count: Jobs in progress at most.
        spare: Of these, how many one caller leaves to others.
    """

    def __init__(self, count: int, spare: int = 1) -> None:
        self.count, self._each = count, max(1, count - spare)
        self.running = Counter[str]()
        self._served: list[str] = []
        """Callers that run or wait, the one served last at the end."""

    def next(self, waiting: Sequence[str]) -> str | None:
        """The caller whose job begins now; None where no slot is free for a waiting caller."""
        if self.running.total() >= self.count:
            return None
        ready = [each for each in waiting if self.running[each] < self._each]
        served = {each: number for number, each in enumerate(self._served)}
        return min(ready, key=lambda each: (self.running[each], served.get(each, -1)), default=None)

    def begin(self, own: str, waiting: Sequence[str]) -> None:
        """A job of this caller begins."""
        self.running[own] += 1
        known = {*waiting, *self.running}
        self._served = [*(each for each in self._served if each in known and each != own), own]

    def end(self, own: str) -> None:
        """A job of this caller is over."""
        self.running[own] -= 1
        self.running += Counter()  # drops callers without a job


class FairSlots:
    """Slots for threads, see `FairOrder`. The time of a slot is charged to the request it is held for.

    Args:
        count: Slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._order = FairOrder(count)
        self._changed = threading.Condition()
        self._waiting: list[str] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for a slot and hold it.

        Raises:
            SettingsError: If the request has no time left for such work.
        """
        charged().require_time()
        own = caller.get()
        with self._changed:
            self._waiting.append(own)
            try:
                self._changed.wait_for(lambda: self._order.next(self._waiting) == own)
            finally:
                self._waiting.remove(own)
            self._order.begin(own, self._waiting)
            self._changed.notify_all()
        begin = monotonic()
        try:
            yield
        finally:
            with self._changed:
                charged().side_seconds += monotonic() - begin
                self._order.end(own)
                self._changed.notify_all()
