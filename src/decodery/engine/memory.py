"""What tasks hold of the memory for keys and values, and how much each owner may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from decodery.core.errors import OutOfMemory
from decodery.models.cache.account import resident, resident_beside
from decodery.models.cache.cache import KVCache
from decodery.models.cache.memory_limit import MemoryLimit
from decodery.step.sequence import Sequence

from .preempt import caches, caches_of
from .prefixes import PrefixCache
from .task import CoroutineTask, SchedulerEntry
from .text import reads, unread

_EVICTIONS = 8  # stored prefixes that one step removes for drafts at most


class MemoryBudget:
    """Bounds what all tasks hold together, and what those of one owner hold.

    Tasks begin, and go on, where what they take next fits. What they take beyond that is refused by the limit.

    Attributes:
        limit: What pages of all tasks, of their drafters and of what is kept may take; None for no bound.
        known_due: Gives the bytes that the next steps of some tasks take, by their ids: those that need no look.

    Args:
        most: Bytes of all, None for no bound.
        owner_part: What one owner may hold of them.
        prefixes: What is kept for later texts, which goes first.
        chunk: Rows of a prompt in one pass.
        rows: Of one pass.
        row_bytes: Of a row's logits.
    """

    def __init__(
        self,
        most: int | None,
        owner_part: float,
        prefixes: PrefixCache | None,
        chunk: int,
        rows: int = 1,
        row_bytes: int = 0,
    ) -> None:
        self.limit = None if most is None else MemoryLimit(most, self._give_back)
        self.known_due: Callable[[], Mapping[int, int]] = dict
        self._prefixes = prefixes
        self._counted: Ordered[SchedulerEntry] = ()
        self._own = None if most is None else int(most * owner_part)
        self._shared, self._chunk = owner_part < 1, chunk
        self._rows, self._row_bytes = rows, max(row_bytes, 1)

    def within(self) -> AbstractContextManager[None]:
        """A block whose caches count towards the limit."""
        return nullcontext() if self.limit is None else self.limit.within()

    @property
    def used(self) -> int | None:
        """Bytes that are allocated, None where nothing bounds them."""
        return None if self.limit is None else self.limit.used

    def held(self, runs: Ordered[SchedulerEntry], *, kept: bool = False) -> int:
        """Bytes that tasks have in use, or will once they are read; what several of them share counts once.

        Args:
            runs: The tasks.
            kept: Count what is kept for later texts as well.
        """
        read = [cache for run in runs for cache in caches(run)]
        if kept and self._prefixes is not None:
            read += self._prefixes.caches
        return resident(read) + _beside(runs) + self._due(runs)

    def by_owner(self, runs: Ordered[SchedulerEntry]) -> dict[str, int]:
        """Bytes that the tasks of each owner hold."""
        members: dict[str, list[SchedulerEntry]] = {}
        for run in runs:
            members.setdefault(run.owner, []).append(run)
        return {owner: self.held(those) for owner, those in members.items()}

    def fits(self, runs: Ordered[SchedulerEntry], joins: SchedulerEntry | None = None) -> bool:
        """Whether what tasks hold and take next fits, where needed once nothing is kept for later texts.

        Args:
            runs: The tasks.
            joins: One that is to go on beside them.
        """
        if self.limit is None:
            return True
        self.count(runs)
        more = self._due(runs)
        if joins is not None:
            more += self.needed(joins) + self._logits([*runs, joins]) - self.limit.reserved
        while self.limit.used + self.limit.reserved + more > self.limit.most:
            if not self._give_back():
                return False
        return True

    def count(self, runs: Ordered[SchedulerEntry]) -> None:
        """Count what tasks hold outside of pages, and what is kept for later texts."""
        if self.limit is None:
            return
        stored = [cache for run in _storing(runs) for cache in caches(run)]
        kept = {} if self._prefixes is None else self._prefixes.states
        self.limit.beside = resident_beside(stored, kept) + _beside(runs)
        self.limit.reserved = self._logits(runs)
        self._counted = runs

    def _logits(self, runs: Ordered[SchedulerEntry]) -> int:
        """Bytes of the logits of a pass over tasks; none where one is alone, which goes on in any case."""
        if len(runs) < 2:
            return 0
        # Of most texts there is one row.
        rows = sum([1 if type(run.task) is Sequence and not run.prompt_rows else _rows(run) for run in runs])
        return min(rows, self._rows) * self._row_bytes

    def draft_nodes(self, nodes: int, texts: int, wanted: int, runs: Ordered[SchedulerEntry] = ()) -> int:
        """Nodes that each text may draft: those whose logits fit, once nothing is kept for later texts.

        Args:
            nodes: Of each at most.
            texts: How many share what there is.
            wanted: Rows that these draft at most.
            runs: Those that have yet to take pages for the step.
        """
        if self.limit is None or not wanted:
            return nodes
        due, tries = self._due(runs), _EVICTIONS
        while (free := self.limit.most - self.limit.used - self.limit.reserved - due) < wanted * self._row_bytes:
            if not tries or not self._give_back():
                return min(nodes, max(free, 0) // self._row_bytes // texts)
            tries -= 1
        return nodes

    def reserve(self, rows: int) -> None:
        """Let pages leave room for the logits of so many drafted rows, until tasks are counted again."""
        if self.limit is not None:
            self.limit.reserved += rows * self._row_bytes

    def _give_back(self) -> bool:
        """Free some of what is kept for later texts; False where nothing is."""
        if self._prefixes is None:
            return False
        states = bool(self._prefixes.states)
        found = self._prefixes.evict()
        if states:
            self.count(self._counted)
        return found

    def collect(self) -> bool:
        """See `MemoryLimit.collect`."""
        return self.limit is not None and self.limit.collect()

    def fits_owner(self, own: Ordered[SchedulerEntry], run: SchedulerEntry) -> bool:
        """Whether a task fits beside those of its owner."""
        if self._own is None or not self._shared:
            return True
        needed = self.needed(run) if own else self.least(run)
        return self._surely(own, needed, self._own) or self.held(own) + needed <= self._own

    def too_large(self, runs: Ordered[SchedulerEntry]) -> str | None:
        """The owner whose tasks hold more than one owner may; None where there is none."""
        if self._own is None or not self._shared or self._surely(runs, 0, self._own):
            return None
        own = self._own
        return next((owner for owner, held in self.by_owner(runs).items() if held > own), None)

    def greediest(self, runs: Ordered[SchedulerEntry]) -> str:
        """The owner whose tasks hold the most."""
        if len({run.owner for run in runs}) == 1:
            return runs[0].owner
        found = self.by_owner(runs)
        return max(found, key=found.__getitem__)

    def require_possible(self, run: SchedulerEntry) -> None:
        """Raise OutOfMemory for a task that would not fit alone."""
        bounded = self._shared or isinstance(run.task, Sequence) or run.task.memory is not None
        if self._own is not None and bounded and (least := self.least(run)) > self._own:
            raise self.refusal(run, least)

    def refusal(self, run: SchedulerEntry, bytes_: int) -> OutOfMemory:
        """The error of a task that needs so many bytes."""
        assert self._own is not None
        whose = "one key" if self._shared else "the engine"
        if isinstance(run.task, CoroutineTask):
            if run.task.memory is not None:
                return OutOfMemory(
                    f"a pass over this canvas needs {bytes_ / 2**20:.1f} MiB of memory, and {whose} "
                    f"may hold {self._own / 2**20:.1f}: take a shorter canvas or a smaller block, or raise cache_bytes"
                )
            return OutOfMemory(
                f"this search needs {bytes_ / 2**20:.1f} MiB of keys and values, and {whose} may hold "
                f"{self._own / 2**20:.1f}: ask for fewer or shorter texts, or raise cache_bytes"
            )
        return OutOfMemory(
            f"a prompt of {run.task.request.prompt_length} tokens needs {bytes_ / 2**20:.1f} MiB of keys and values, "
            f"and {whose} may hold {self._own / 2**20:.1f}: raise cache_bytes, or shorten the prompt"
        )

    def needed(self, run: SchedulerEntry) -> int:
        """Bytes that a task which waits will take at once.

        Of a text what reading its tokens takes, also for its drafter; where it must not stop, also what it will write.
        """
        if isinstance(run.task, Sequence):
            return self._more(run.task, _tokens(run.task))
        return run.owed + _awaited(run.task)

    def least(self, run: SchedulerEntry) -> int:
        """Bytes without which a task cannot go on: a text can without drafts."""
        if isinstance(run.task, Sequence):
            return self._own_more(run.task, _tokens(run.task))
        return self.needed(run)

    def _due(self, runs: Ordered[SchedulerEntry]) -> int:
        """Bytes that tasks take for what they read next."""
        known = self.known_due() if runs else {}
        return sum([known[key] if (key := id(run)) in known else self._due_of(run) for run in runs])

    def _due_of(self, run: SchedulerEntry) -> int:
        return self._missing(run.task) if isinstance(run.task, Sequence) else self.needed(run)

    def _missing(self, seq: Sequence) -> int:
        """Bytes of its tokens, and of a step with its largest draft, that a text has not taken yet."""
        return self._more(seq, _tokens(seq) + (0 if reads(seq) else seq.request.most_drafted))

    def _more(self, seq: Sequence, tokens: int) -> int:
        """Bytes that a text and its drafter take until it has so many tokens."""
        own, drafter = self._own_more(seq, tokens), seq.request.drafter
        try:
            return own if drafter is None else own + drafter.more_for(seq, tokens)
        except Exception as error:
            # A drafter that breaks ends its own text, wherever memory is counted.
            seq.fail(error)
            return own

    def _own_more(self, seq: Sequence, tokens: int) -> int:
        rows = 1 + seq.request.most_drafted
        return sum(cache.more_for(tokens, rows, self._chunk) for cache in caches_of(seq))

    def _surely(self, runs: Ordered[SchedulerEntry], more: int, most: int) -> bool:
        """Whether it fits if all pages were theirs, which is known without looking at each text."""
        return self.limit is not None and not _storing(runs) and self.limit.used + self._due(runs) + more <= most


def _rows(run: SchedulerEntry) -> int:
    """Rows of logits that a task takes in its next pass, drafted ones apart, and those that its memory counts."""
    if isinstance(run.task, Sequence):
        return max(min(run.prompt_rows, unread(run.task)), 1)
    if run.task.memory is not None:
        return 0
    asked = [run.requests[number].segment for number in run.unanswered]
    # Of what a task asks first nothing is known yet.
    return max(sum(len(each if each.logit_rows is None else each.logit_rows) for each in asked), 1)


def _awaited(task: CoroutineTask[Any]) -> int:
    """Bytes that the results of a task's next pass take."""
    return 0 if task.memory is None or task.finished else task.memory.awaited


def _beside(runs: Ordered[SchedulerEntry]) -> int:
    """Bytes that tasks hold of results of earlier passes."""
    tasks = [run.task for run in runs if type(run.task) is not Sequence]
    return sum(task.memory.bytes for task in tasks if isinstance(task, CoroutineTask) and task.memory is not None)


def _tokens(seq: Sequence) -> int:
    """The tokens that memory must be there for: those of a text that cannot give memory back to its end."""
    if all(cache.anew for cache in caches_of(seq)):
        return len(seq.tokens)
    last = seq.request.prompt_length + seq.request.max_new_tokens
    return max(len(seq.tokens), min(last, seq.request.model.config.max_positions))


def _storing(runs: Ordered[SchedulerEntry]) -> list[SchedulerEntry]:
    """Tasks whose caches hold something beside pages: recurrent states, an encoder's memory or what a policy keeps.

    Most texts hold nothing, which shows without a call for each.
    """
    return [
        run
        for run in runs
        if not (
            type(run.task) is Sequence
            and type(cache := run.task.cache) is KVCache
            and cache.policy is cache.memory is cache.states.memory is cache.states.tentative is None
            and not cache.states.known
        )
        and _stores(run)
    ]


def _stores(run: SchedulerEntry) -> bool:
    """Whether its caches hold something beside pages; the branches of a search are alike in this."""
    seq = run.task if isinstance(run.task, Sequence) else next(iter(run.branches.values()), None)
    return seq is not None and any(
        cache.policy is not None or cache.memory is not None or cache.states.bytes > 0 for cache in caches_of(seq)
    )
