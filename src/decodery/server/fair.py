"""Who is next: owners in turn, those with fewer texts in progress first, and the jobs of each as they came."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection

from .job import Job


class FairQueue:
    """Jobs that wait, by owner.

    Args:
        places: Jobs that one owner may have in progress.

    Attributes:
        running: How many texts each owner has in progress, all of a search counted.
    """

    def __init__(self, places: int) -> None:
        self.running = Counter[str]()
        self._places = places
        self._taken = Counter[str]()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, job: Job) -> None:
        self._waiting.setdefault(job.owner, deque()).append(job)
        self._size += 1

    def begin(self, job: Job) -> None:
        """A job is in progress."""
        self.running[job.owner] += job.texts
        self._taken[job.owner] += 1

    def end(self, job: Job) -> None:
        """A job that was in progress is over."""
        for counts, amount in ((self.running, job.texts), (self._taken, 1)):
            counts[job.owner] -= amount
            if not counts[job.owner]:
                del counts[job.owner]

    def pop(self, blocked: Collection[str] = ()) -> Job | None:
        """The next job: of the owner with the fewest in progress, among equals of the one served longest ago.

        Args:
            blocked: Owners whose turn it is not.
        """
        ready = [owner for owner in self._waiting if owner not in blocked and self._taken[owner] < self._places]
        if not ready:
            return None
        owner = min(ready, key=lambda each: self.running[each])
        job = self._waiting[owner].popleft()
        self._waiting.move_to_end(owner)
        if not self._waiting[owner]:
            del self._waiting[owner]
        self._size -= 1
        return job

    def remove(self, gone: set[Job]) -> list[Job]:
        """Take these out, where they are; returns them."""
        found: list[Job] = []
        for owner, jobs in list(self._waiting.items()):
            here = [job for job in jobs if job in gone]
            if here:
                found += here
                left = deque(job for job in jobs if job not in gone)
                if left:
                    self._waiting[owner] = left
                else:
                    del self._waiting[owner]
        self._size -= len(found)
        return found

    def all(self) -> list[Job]:
        return [job for jobs in self._waiting.values() for job in jobs]
