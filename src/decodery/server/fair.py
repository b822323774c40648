"""Who is next: owners in turn, those with fewer texts in progress first, and the jobs of each as they came."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from .job import Job


class FairQueue:
    """Jobs that wait, by owner.

    Args:
        running: How many texts each owner has in progress, all of a search counted; the caller of `pop` keeps it up to
            date.
    """

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, job: Job) -> None:
        self._waiting.setdefault(job.owner, deque()).append(job)
        self._size += 1

    def pop(self) -> Job | None:
        """The next job: of the owner with the fewest in progress, among equals of the one served longest ago."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=lambda each: self.running[each])
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
