"""The tasks of a pass: texts that write before texts that read, within rows and memory, and none waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TypeVar

from decodery.core.errors import OutOfMemory, SettingsError
from decodery.models.cache.account import resident
from decodery.models.cache.cache import KVCache
from decodery.step.sequence import Sequence
from decodery.step.writer import writes

from .memory import MemoryBudget
from .monitoring import monitors_of
from .pace import LEAST_ROWS, Pace
from .preempt import caches, drop, let_go, withdraw
from .prefixes import PrefixCache
from .share import PassBudget, most_nodes
from .task import SchedulerEntry, Task
from .text import reads, unread

T = TypeVar("T")

_READERS = 4
"""Texts that read get one row in so many, however many texts write."""
_SELDOM = 8
"""Times that steps ask for tasks which wait, of which one looks at what each owner holds."""


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine.

    Owners get equal parts of a pass, and so do the tasks of each.

    Attributes:
        rows: Of one pass of a model; drafts are trimmed, prompts wait and a search is spread over several passes before
            it is exceeded.
        texts: Tasks in progress at a time; others wait for their turn.
        cache_bytes: Of all keys and values of tasks in progress, of their draft models and of those that are kept for
            later tasks, and of the logits of a pass that several tasks share, None for no bound. It is never exceeded.
            What is kept goes first, and drafts are trimmed to what is left; then a task that no longer
            fits gives its memory back and is read again later. One that cannot be read again waits until all that it
            may write fits. A text that needs more than this alone goes on without drafts; any task that still does
            ends with OutOfMemory.
        seconds: That a pass is to take while texts are written, by what earlier ones took; prompts are read in smaller
            chunks for it, down to 16 rows, and searches get fewer rows of a pass that others wait for. None for no
            bound.
        branches: Texts that one task may have written at a time, by which methods are held that open texts of their
            own.
        side_seconds: Of scorers, tests of programs and patterns for one task; None for no bound.
        owner_part: Of `cache_bytes` and of `texts`, what the tasks of one owner may take at most, so that those of
            others find room at once.
    """

    rows: int = 1024
    texts: int = 1024
    cache_bytes: int | None = None
    seconds: float | None = None
    branches: int | None = None
    side_seconds: float | None = None
    owner_part: float = 1.0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.texts < 1 or (self.cache_bytes is not None and self.cache_bytes < 1):
            raise SettingsError("an engine needs limits of at least one row, one text and one byte")
        if self.seconds is not None and not self.seconds > 0:
            raise SettingsError(f"a pass needs more than {self.seconds} seconds")
        if not 0 < self.owner_part <= 1:
            raise SettingsError(f"the part of an owner is above 0 and at most 1, not {self.owner_part}")


class Schedule:
    """Tasks in progress and tasks that wait.

    Args:
        prefixes: What texts leave for those that begin alike, None to keep nothing.
        preemptions: How often a text gave its memory back.
        pace: What passes take that read prompts, for those who wait for one.
        budget: How passes are divided.
        runs: Those in progress, the earliest first.
        changes: How often tasks came, left, had their prompts read or were to give memory back.
    """

    def __init__(self, limits: Limits, chunk: int, prefixes: PrefixCache | None = None, row_bytes: int = 0) -> None:
        self.limits = limits
        self.prefixes = prefixes
        self.preemptions = 0
        self.pace = Pace()
        self.budget = PassBudget(limits.rows, limits.seconds, chunk)
        self.memory = MemoryBudget(limits.cache_bytes, limits.owner_part, prefixes, chunk, limits.rows, row_bytes)
        self.runs: list[SchedulerEntry] = []
        self.changes = 0
        self._chunk = chunk
        self._waiting: deque[SchedulerEntry] = deque()
        self._preempted: set[int] = set()
        self._made_room = False
        self._refused: tuple[int, int] | None = None
        self._asked = 0

    @property
    def texts(self) -> list[Sequence]:
        """Texts that take part in passes, the earliest first."""
        return [run.task for run in self.active if isinstance(run.task, Sequence)]

    @property
    def waiting(self) -> int:
        """Tasks that are not in progress yet, or no longer."""
        return len(self._waiting)

    @property
    def admits(self) -> bool:
        """Whether a task that waits may be taken in.

        There is a place for it, and since all were refused tasks have come or left, also of those that wait, or gave
        memory back, or those of one owner have grown too large.
        """
        if not self._waiting or len(self.runs) >= self.limits.texts:
            return False
        if self._refused is None or self._refused[0] != self.changes or (self.memory.used or 0) < self._refused[1]:
            return True
        if [run for run in self._waiting if run.task.finished]:
            return True
        # What each owner holds takes longer than a step.
        self._asked += 1
        return self._asked % _SELDOM == 0 and self.memory.too_large(self.runs) is not None

    @property
    def fits(self) -> bool:
        """Whether what tasks in progress hold, and take for their next step, is no more than there may be."""
        return self.memory.fits(self.runs)

    @property
    def waiting_owners(self) -> set[str]:
        """Those whose tasks wait here for a place or for memory."""
        return {run.owner for run in self._waiting}

    @property
    def active(self) -> list[SchedulerEntry]:
        return [run for run in self.runs if not run.task.paused]

    def add(self, run: SchedulerEntry) -> None:
        """A new task.

        Raises:
            OutOfMemory: For a text whose prompt alone would not fit, or a canvas of which a pass would not.
        """
        self.memory.require_possible(run)
        if isinstance(run.task, Sequence):
            request = run.task.request
            shown = request.drafter is not None and request.drafter.requirements.prompt
            run.prompt_rows = self._chunk if shown or request.prompt_logprobs is not None else 1
        run.ledger.side_limit = inf if self.limits.side_seconds is None else self.limits.side_seconds
        self._waiting.append(run)
        self.changes += 1

    def busy(self, seq: Sequence) -> bool:
        """Whether a text is in the middle of a turn."""
        return any(run.task is seq and run.coroutine is not None for run in self.runs)

    def preempt(self, task: Task) -> None:
        """Take the memory of a task's models from it, as soon as that can be."""
        self._preempted.add(id(task))
        self.changes += 1

    def starve(self, run: SchedulerEntry) -> bool:
        """Let a task that found no memory wait until another one has given some back.

        False where that cannot be.
        """
        if all(each is run or each.stalled for each in self.runs):
            freed = [_guarded(each, partial(_freed, each)) for each in self._waiting]
            if not (self._made_room or any(freed) or self.memory.collect()):
                # It begins its turn anew then.
                return _guarded(run, partial(_without_drafts, run))
        if not _guarded(run, partial(withdraw, run)):
            return False
        if run.task.finished:
            return True
        if isinstance(run.task, Sequence) and _holds(run):
            # What cannot be read again has its turn once others have made room for it.
            run.stalled = True
            return True
        self._put_off(run)
        run.starved = self._made_room = True
        return True

    def starting(self) -> list[tuple[SchedulerEntry, int, int]]:
        """Tasks that begin a turn now, how many unread tokens each may read, and how many nodes it may draft."""
        self._made_room = False
        self.leave()
        self._give_back()
        if self.admits:
            self._admit()
        begins = [run for run in self.active if run.coroutine is None and self._ready(run)]
        reading = [isinstance(run.task, Sequence) and reads(run.task) for run in begins]
        readers = [run for run, each in zip(begins, reading, strict=True) if each]
        writers = [run for run, each in zip(begins, reading, strict=True) if not each]
        rows = self.limits.rows - self.budget.taken(self.active, begins)
        kept = rows // _READERS if readers else 0
        count = max(len(writers), 1)
        nodes = max((rows - kept) // count - 1, 0)
        most = [most_nodes(run) for run in writers]
        nodes = self.memory.draft_nodes(nodes, count, sum([min(nodes, each) for each in most]), self.runs)
        found = [(run, 0, nodes) for run in writers]
        drafted = sum([min(nodes, each) for each in most])
        self.memory.reserve(drafted)
        left = max(rows - len(writers) - drafted, kept)
        seconds = self._seconds_to_read()
        for number, run in enumerate(sorted(readers, key=lambda run: run.served)):
            assert isinstance(run.task, Sequence)
            before = run.task.cache.next_position
            fit = self.pace.rows(seconds, before)
            # Who has waited longest reads on in any case.
            timely = int(min(fit, self._chunk)) if fit >= LEAST_ROWS else LEAST_ROWS * (number == 0)
            chunk = min(self._chunk, left, unread(run.task), timely)
            if chunk > 0 or not found:
                found.append((run, max(chunk, 1), 0))
                left -= chunk
                seconds -= self.pace.seconds(chunk, before)
        return found

    def _seconds_to_read(self) -> float:
        """What prompts may take of the next pass, beside those who write in it."""
        writing = [run.task for run in self.active if not isinstance(run.task, Sequence) or not reads(run.task)]
        if self.limits.seconds is None or not writing:
            return inf
        texts = (task for task in writing if isinstance(task, Sequence))
        return self.limits.seconds - sum(self.pace.seconds(1, task.cache.next_position) for task in texts)

    def leave(self) -> None:
        """Let go of finished tasks, and hand the prompts that were read to those that share them."""
        for run in (*self.runs, *self._waiting):
            if run.task.finished:
                run.stop()
            if isinstance(run.task, Sequence):
                if self.prefixes is not None:
                    with suppress(OutOfMemory):  # what is only kept for others is done without
                        self._keep_prefix(self.prefixes, run.task)
                # Whoever begins like a prompt needs all of it, so that it is kept first.
                if (self.prefixes is None or run.task.scheduling.prompt_kept) and isinstance(run.task.cache, KVCache):
                    run.task.cache.release_passed()
                if run.task.scheduling.prompt_owner is not None and not run.task.finished:
                    _guarded(run, partial(share_prompt, run.task, run.task.scheduling.prompt_owner))
                    # It takes less memory from now on.
                    self.changes += run.task.scheduling.prompt_owner is None
                if run.prompt_rows and run.task.position:
                    # So does one whose prompt was read.
                    run.prompt_rows = 0
                    self.changes += 1
        if any(run.task.finished for run in self.runs):
            if self.memory.limit is not None:
                for run in self.runs:
                    if run.task.finished:
                        let_go(run)
            for run in self._waiting:
                run.starved = False
            self.runs = [run for run in self.runs if not run.task.finished]
            self.memory.count(self.runs)
            self.changes += 1
        if any(run.task.finished for run in self._waiting):
            self._waiting = deque(run for run in self._waiting if not run.task.finished)
            self.changes += 1

    def _ready(self, run: SchedulerEntry) -> bool:
        """Whether it need not wait for another text to read the prompt they share."""
        seq = run.task
        if not isinstance(seq, Sequence) or seq.scheduling.prompt_owner is None:
            return True
        if seq.scheduling.prompt_owner.finished:
            seq.scheduling.prompt_owner = None
            return True
        return False

    def _admit(self) -> None:
        """Let in tasks that wait, in order. Who has no room holds up no other owner, but for those who hold more."""
        blocked = set[str]()
        most = max(int(self.limits.texts * self.limits.owner_part), 1)
        for run in list(self._waiting):
            if len(self.runs) >= self.limits.texts:
                return
            if run.owner in blocked:
                continue
            own = [each for each in self.runs if each.owner == run.owner]
            fits_owner = self.memory.fits_owner(own, run)
            if not own and not fits_owner:
                # A search that was put off, and would never be admitted.
                run.task.fail(self.memory.refusal(run, self.memory.least(run)))
                continue
            if len(own) >= most or (self.runs and run.starved) or not fits_owner:
                blocked.add(run.owner)
            elif self.runs and not self.memory.fits(self.runs, run):
                held = self.memory.by_owner(self.runs)
                blocked |= {run.owner, *(owner for owner in held if held[owner] >= held.get(run.owner, 0))}
            else:
                self._waiting.remove(run)
                self.runs.append(run)
                self.changes += 1
                if isinstance(run.task, Sequence):
                    _guarded(run, partial(self.find_prefix, run.task))
        self._refused = self.changes, self.memory.used or 0

    def find_prefix(self, seq: Sequence) -> None:
        """Let a text that has read nothing begin with what others have read of its prompt."""
        if self.prefixes is None or seq.request.logits_source is not None or seq.request.prompt_logprobs is not None:
            return
        if not self.prefixes.serves(seq.request.model):
            return
        most = seq.cache.takes(len(seq.tokens))
        if seq.cache.length or not most or ((monitors := monitors_of(seq)) is not None and monitors.private):
            return
        # The last one is left to read.
        if (found := self.prefixes.find(seq.tokens[: most + 1], seq.request.cache_namespace)) is None:
            return
        seq.cache, found.policy = found, seq.cache.policy
        if seq.request.slots is not None:
            seq.cache.provide(seq.request.slots)
        if seq.position == 0:
            seq.scheduling.cached = found.next_position

    def _keep_prefix(self, prefixes: PrefixCache, seq: Sequence) -> None:
        """Keep what a text has read for later ones: its prompt when that is done, and all of it when it has ended."""
        if seq.request.logits_source is not None or seq.position == 0 or seq.error is not None:
            return
        if not prefixes.serves(seq.request.model):
            return
        monitors = monitors_of(seq)
        if monitors is not None and monitors.requirements.changes:
            return
        if seq.finished or not seq.scheduling.prompt_kept:
            seq.scheduling.prompt_kept = True
            prefixes.add(seq.tokens, seq.cache, seq.request.cache_namespace)

    def _give_back(self) -> None:
        """Preempt who was named; then the youngest, while the texts in progress hold more than they may."""
        if self._preempted:
            named = [run for run in (*self.runs, *self._waiting) if id(run.task) in self._preempted]
            # Who is in the middle of something gives back after it; who has left is forgotten.
            dropped = {id(run.task) for run in named if _guarded(run, partial(drop, run))}
            self.preemptions += len(dropped)
            self._preempted = {id(run.task) for run in named} - dropped
        while (owner := self.memory.too_large(self.runs)) is not None or not self.memory.fits(self.runs):
            greedy = self.memory.greediest(self.runs) if owner is None else owner
            own = [run for run in self.runs if run.owner == greedy]
            if owner is not None and len(own) == 1:
                if not _guarded(own[0], partial(_without_drafts, own[0])):
                    own[0].task.fail(self.memory.refusal(own[0], self.memory.held(own)))
                if own[0].task.finished:
                    self.leave()
                continue
            # One task goes on in any case, the earliest.
            those = own[::-1] if len(own) < len(self.runs) and owner is None else own[:0:-1]
            candidates = (run for run in those if _holds(run) and _guarded(run, partial(drop, run)))
            youngest = next((run for run in candidates if self.memory.needed(run)), None)
            if youngest is None:
                return
            self.preemptions += 1
            _guarded(youngest, partial(self.memory.require_possible, youngest))
            # Else it would come back at once, read everything again and be put off at its next growth.
            youngest.starved = True
            self._put_off(youngest)

    def _put_off(self, run: SchedulerEntry) -> None:
        self.runs.remove(run)
        self.changes += 1
        self._waiting.appendleft(run)

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values that are kept or in use, as allocated where there is a limit.

        Elsewhere with those that are due once texts in progress are read.
        """
        used = self.memory.used
        return self.memory.held(self.runs, kept=True) if used is None else used


def _guarded(run: SchedulerEntry, do: Callable[[], T]) -> T | bool:
    """What `do` gives; an error ends the task that it is done for, and counts as done."""
    try:
        return do()
    except Exception as error:
        run.task.fail(error)
        return True


def share_prompt(seq: Sequence, owner: Sequence) -> None:
    """Take over the prompt that another text has read, once it has.

    Not what is no plain reading of it, or read by another model.
    """
    shared = seq.request.prompt_length - 1
    if writes(owner.request.model) or (isinstance(owner.cache, KVCache) and not owner.cache.begins(shared)):
        seq.scheduling.prompt_owner = None
    elif owner.cache.next_position >= shared and not owner.paused:
        seq.cache = owner.cache.fork()
        seq.cache.truncate(shared)
        if seq.request.slots is not None:
            seq.cache.provide(seq.request.slots)
        seq.prompt_token_logprobs = list(owner.prompt_token_logprobs)
        seq.scheduling.prompt_owner = None


def _holds(run: SchedulerEntry) -> bool:
    """Whether dropping it might free something."""
    return any(cache.bytes for cache in caches(run))


def _without_drafts(run: SchedulerEntry) -> bool:
    """Let a text go on without the models that draft, or without any drafts; False where it has none.

    Drafts change no token.
    """
    if not isinstance(run.task, Sequence) or (drafter := run.task.request.drafter) is None:
        return False
    seq = run.task
    run.stop()
    drafter.forget(seq)
    if drafter.drops_models(seq):
        seq.trace.notes.append("there was no memory for a second model: the text goes on with drafts that need none")
    else:
        seq.rebind(drafter=None)
        if seq.request.prompt_logprobs is None:
            run.prompt_rows = min(run.prompt_rows, 1)
        seq.trace.notes.append("there was no memory for drafts: the text goes on without")
    return True


def _freed(run: SchedulerEntry) -> bool:
    """Whether dropping it frees something."""
    held = resident(caches(run))
    return held > 0 and drop(run) and resident(caches(run)) < held
