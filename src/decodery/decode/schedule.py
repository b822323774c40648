"""Who takes part in a pass: texts that write before texts that read, within rows and memory, nobody for ever last."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..core.sequence import Sequence
from ..errors import OutOfMemory, SettingsError
from ..model.blocks import resident
from ..model.cache import KVCache
from .task import Turn
from .text import reads, unread

_READERS = 4
"""Texts that read get one row in so many, however many texts write."""


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine. rows: of one pass of its model; drafts are trimmed and prompts wait before it is exceeded.

    texts: tasks in progress at a time; others wait for their turn. cache_bytes: of all keys and values of texts in
    progress, None for no bound. A text that no longer fits gives its memory back and reads itself again later.
    """

    rows: int = 1024
    texts: int = 1024
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.texts < 1 or (self.cache_bytes is not None and self.cache_bytes < 1):
            raise SettingsError("an engine needs limits of at least one row, one text and one byte")


class Schedule:
    """Tasks in progress and tasks that wait. runs: those in progress, the earliest first."""

    def __init__(self, limits: Limits, chunk: int) -> None:
        self.limits = limits
        self.runs: list[Turn] = []
        self._chunk = chunk
        self._waiting: deque[Turn] = deque()
        self._preempted: set[int] = set()

    @property
    def texts(self) -> list[Sequence]:
        """Texts that take part in passes, the earliest first."""
        return [run.task for run in self.active if isinstance(run.task, Sequence)]

    @property
    def active(self) -> list[Turn]:
        return [run for run in self.runs if not run.task.paused]

    def add(self, run: Turn) -> None:
        """A new task. Raises OutOfMemory for a text whose prompt alone would not fit."""
        most = self.limits.cache_bytes
        if most is not None and isinstance(run.task, Sequence) and _needed(run.task) > most:
            raise OutOfMemory(
                f"a prompt of {run.task.prompt_length} tokens needs {_needed(run.task) / 2**20:.1f} MiB of keys and "
                f"values, and the engine may hold {most / 2**20:.1f}: raise cache_bytes, or shorten the prompt"
            )
        self._waiting.append(run)

    def busy(self, seq: Sequence) -> bool:
        """Whether a text is in the middle of a turn."""
        return any(run.task is seq and run.asking is not None for run in self.runs)

    def preempt(self, seq: Sequence) -> None:
        """Take the memory of a text's models from it, before its next turn."""
        self._preempted.add(id(seq))

    def turns(self) -> list[tuple[Turn, int, int]]:
        """Tasks that begin a turn now, how many unread tokens each may read, and how many nodes it may draft."""
        self.leave()
        self._give_back()
        self._admit()
        begins = [run for run in self.active if run.asking is None and self._ready(run)]
        reading = [isinstance(run.task, Sequence) and reads(run.task) for run in begins]
        readers = [run for run, each in zip(begins, reading, strict=True) if each]
        writers = [run for run, each in zip(begins, reading, strict=True) if not each]
        rows = self.limits.rows - sum(len(ask.segment) for run in self.active for ask in run.asks)
        kept = rows // _READERS if readers else 0
        nodes = max((rows - kept) // max(len(writers), 1) - 1, 0)
        found = [(run, 0, nodes) for run in writers]
        left = max(rows - sum(1 + min(nodes, _most_nodes(run)) for run in writers), kept)
        for run in sorted(readers, key=lambda run: run.served):
            assert isinstance(run.task, Sequence)
            chunk = min(self._chunk, left, unread(run.task))
            if chunk > 0 or not found:
                found.append((run, max(chunk, 1), 0))
                left -= chunk
        return found

    def fitting(self, runs: list[Turn]) -> list[Turn]:
        """Those that share the next pass: who has waited longest first, and at least one."""
        rows = [sum(len(ask.segment) for ask in run.asks) for run in runs]
        if sum(rows) <= self.limits.rows:
            return runs
        chosen: set[int] = set()
        total = 0
        for number in sorted(range(len(runs)), key=lambda number: runs[number].served):
            if not chosen or total + rows[number] <= self.limits.rows:
                chosen.add(number)
                total += rows[number]
        return [run for number, run in enumerate(runs) if number in chosen]

    def leave(self) -> None:
        """Let go of finished tasks, and hand the prompts that were read to those that share them."""
        for run in (*self.runs, *self._waiting):
            if run.task.finished:
                run.stop()
            elif isinstance(run.task, Sequence):
                _share_prompt(run.task)
        if any(run.task.finished for run in self.runs):
            self.runs = [run for run in self.runs if not run.task.finished]
        if any(run.task.finished for run in self._waiting):
            self._waiting = deque(run for run in self._waiting if not run.task.finished)

    def _ready(self, run: Turn) -> bool:
        """Whether it need not wait for another text to read the prompt they share."""
        seq = run.task
        if not isinstance(seq, Sequence) or seq.like is None:
            return True
        if seq.like.finished:
            seq.like = None
            return True
        return False

    def _admit(self) -> None:
        while self._waiting and len(self.runs) < self.limits.texts:
            task, most = self._waiting[0].task, self.limits.cache_bytes
            if most is not None and self.runs and isinstance(task, Sequence) and self._held() + _needed(task) > most:
                return
            self.runs.append(self._waiting.popleft())

    def _give_back(self) -> None:
        """Preempt who was named; then the youngest, while the texts in progress hold more than they may."""
        if self._preempted:
            named = [run for run in (*self.runs, *self._waiting) if id(run.task) in self._preempted]
            for run in named:
                if run.asking is None:
                    _drop(run)
            # Who is in the middle of a turn gives back behind it; who has left is forgotten.
            self._preempted = {id(run.task) for run in named if run.asking is not None}
        most = self.limits.cache_bytes
        while most is not None and self._held() > most:
            idle = [run for run in self.runs[1:] if run.asking is None and isinstance(run.task, Sequence)]
            if not idle:
                return
            _drop(idle[-1])
            self.runs.remove(idle[-1])
            self._waiting.appendleft(idle[-1])

    def _held(self) -> int:
        """Bytes of keys and values that the texts in progress hold, or will as soon as they have read what they have.

        What several of them share counts once.
        """
        texts = [run.task for run in self.runs if isinstance(run.task, Sequence)]
        caches = [text.cache for text in texts if isinstance(text.cache, KVCache)]
        missing = sum(max(_needed(text) - text.cache.bytes, 0) for text in texts if isinstance(text.cache, KVCache))
        return resident(cache.blocks for cache in caches) + missing


def _share_prompt(seq: Sequence) -> None:
    """Take over the prompt that another text has read, once it has."""
    if seq.like is None:
        return
    owner, shared = seq.like.cache, seq.prompt_length - 1
    if owner.next_position >= shared and not seq.like.paused:
        seq.cache = owner.fork()
        seq.cache.truncate(shared)
        if seq.slots is not None:
            seq.cache.provide(seq.slots)
        seq.like = None


def _most_nodes(run: Turn) -> int:
    return run.task.max_nodes if isinstance(run.task, Sequence) and run.task.drafter is not None else 0


def _drop(run: Turn) -> None:
    """Take all that models have read of a text from it."""
    seq = run.task
    assert isinstance(seq, Sequence)
    seq.cache = seq.model.new_cache()
    if seq.slots is not None:
        seq.cache.provide(seq.slots)
    if seq.drafter is not None:
        seq.drafter.forget(seq)


def _needed(seq: Sequence) -> int:
    """Bytes of keys and values that reading the tokens it has takes."""
    return seq.cache.slot_bytes * seq.cache.room_for(len(seq.tokens)) if isinstance(seq.cache, KVCache) else 0
