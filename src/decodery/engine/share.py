"""How the rows of a pass are divided: owners get equal parts, and so do the tasks of each owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ordered

from decodery.step.sequence import Sequence

from .pace import LEAST_ROWS, Pace
from .preempt import passes
from .task import CoroutineTask, SchedulerEntry
from .text import reads, unread

Place = tuple[SchedulerEntry, int]
"""A task and the number of one of its asks."""


class PassBudget:
    """Divides the rows of passes among tasks.

    Searches and canvases fill passes that texts take part in only so far that these take little longer. Each gets at
    least what a text gets.

    Args:
        rows: Of a pass at most.
        seconds: None for no such bound; else what a pass of several searches is to take at most without texts.
        chunk: Rows of a prompt in one pass.

    Attributes:
        wide: What passes of searches have taken.
    """

    def __init__(self, rows: int, seconds: float | None, chunk: int) -> None:
        self.rows = rows
        self.seconds = seconds
        self.wide = Pace()
        self._chunk = chunk
        self._beside = Beside(rows)

    def taken(self, runs: list[SchedulerEntry], begins: list[SchedulerEntry]) -> int:
        """Rows of the next pass that belong to those of these tasks that do not begin a turn now."""
        beginning = set(map(id, begins))
        if len(beginning) == len(runs):
            return 0
        wants = [self._wanted(run) if id(run) in beginning else run.unanswered_rows for run in runs]
        parts = fair([run.owner for run in runs], wants, self.rows)
        return sum(part for run, part in zip(runs, parts, strict=True) if id(run) not in beginning)

    def _wanted(self, run: SchedulerEntry) -> int:
        """Rows that a task which begins a turn could use."""
        if isinstance(run.task, Sequence) and reads(run.task):
            return min(self._chunk, unread(run.task))
        return 1 + most_nodes(run)

    def share(self, run: SchedulerEntry | None, runs: list[SchedulerEntry]) -> int:
        """Rows that a task may fill in a pass with these tasks: all of them where no other takes part."""
        if run is None or len(runs) < 2 or run not in runs:
            return self.rows
        parts = fair([each.owner for each in runs], [self.rows] * len(runs), self.rows)
        works = [each for each in runs if isinstance(each.task, CoroutineTask)]
        return max(1, min(parts[runs.index(run)], self._room(runs, works) // max(len(works), 1)))

    def rows_to_restore(self, runs: list[SchedulerEntry]) -> int:
        """Rows by which a search reads again what was taken from it: beside texts, as slowly as prompts."""
        alone = self.seconds is None or all(isinstance(run.task, CoroutineTask) for run in runs)
        return self.rows if alone else min(LEAST_ROWS, self.rows)

    def places(
        self,
        asked: list[tuple[SchedulerEntry, list[int]]],
        joined: Ordered[SchedulerEntry] = (),
        rows: int = 0,
        *,
        side: bool = False,
    ) -> list[Place] | None:
        """Which of these asks share the next pass, by their tasks and numbers.

        The others wait for a later one. Texts come first, then searches in fair parts of what texts can wait for. Of
        either kind the task that has waited longest gets one ask in any case, a search once it has room for it.

        Args:
            asked: Tasks, and the numbers of their asks.
            joined: Texts that take part all together.
            rows: Of these.
            side: The pass is one of another model, whose time searches do not spend.

        Returns:
            Asks, without those of `joined`; None where not all of these have room.
        """
        every = [(run, number) for run, numbers in asked for number in numbers]
        alone = not joined and all(isinstance(run.task, CoroutineTask) for run, _ in asked)
        restored = None if alone else self._next_restored(asked)
        texts = [each for each in asked if each[0] is restored or not isinstance(each[0].task, CoroutineTask)]
        works = [each for each in asked if each[0] is not restored and isinstance(each[0].task, CoroutineTask)]
        if not works or len(asked) + len(joined) < 2 or self.seconds is None or side:
            if rows + sum(run.unanswered_rows for run, _ in asked) <= self.rows:
                return every
            return None if joined else self._fill(asked, self.rows)
        if alone:
            return self._fill(asked, self._room([run for run, _ in asked], [run for run, _ in works]))
        for_texts = rows + sum(run.unanswered_rows for run, _ in texts)
        # Owners who have searches alone get their part of the rows nevertheless.
        wants = [*(run.unanswered_rows for run, _ in asked), *divided([self.rows] * len(joined), rows)]
        parts = fair([run.owner for run in (*(run for run, _ in asked), *joined)], wants, self.rows)
        searches = {id(run) for run, _ in works}
        kept = sum(part for (run, _), part in zip(asked, parts, strict=False) if id(run) in searches)
        longest, numbers = min(works, key=lambda each: each[0].served)
        ask = min(len(longest.requests[numbers[0]].segment), self.rows)
        least = least_rows(
            [run.owner for run, _ in works], [*(run.owner for run, _ in texts), *(run.owner for run in joined)]
        )
        # Where the search still saves for its ask, these texts need not be taken apart for it.
        if joined and for_texts + (max(kept, ask) if self._beside.ready(ask, least) else 0) > self.rows:
            return None
        credit = self._beside.next(ask, least)
        room = min(credit, max(self.rows - for_texts, kept))
        found = self._fill(works, room) if credit else []
        taken = sum(len(run.requests[number].segment) for run, number in found)
        self._beside.spend(taken)
        return [*(self._fill(texts, max(self.rows - rows - taken, 1)) if texts else ()), *found]

    def _next_restored(self, asked: list[tuple[SchedulerEntry, list[int]]]) -> SchedulerEntry | None:
        """The search that reads again what was taken from it, as a text reads its prompt, one at a time.

        By rows that searches save for, it would take as long as what it had done.
        """
        runs = [run for run, _ in asked if run.waiting is not None and run.unanswered_rows <= LEAST_ROWS]
        return min(runs, key=lambda run: run.served, default=None)

    def _fill(self, asked: list[tuple[SchedulerEntry, list[int]]], room: int) -> list[Place]:
        """As many of these asks as there is room for, in fair parts; the task that has waited longest gets one.

        Args:
            asked: Tasks and the numbers of their asks.
            room: Rows.

        Returns:
            The asks in the order of their turns, by which those left out come first next time.
        """
        runs = [run for run, _ in asked]
        left = [[(number, len(run.requests[number].segment)) for number in numbers] for run, numbers in asked]
        order = sorted(range(len(runs)), key=lambda n: runs[n].served)
        taken = [0] * len(runs)
        number, rows = left[order[0]].pop(0)
        found, taken[order[0]], room = [(order[0], number)], rows, max(room - rows, 0)
        parts = fair([run.owner for run in runs], [sum(rows for _, rows in each) for each in left], room)
        # Rows of an ask stand together, so that parts are not filled to the last row: what is left then goes to
        # whoever can use it.
        for bounds in ([had + part for had, part in zip(taken, parts, strict=True)], [self.rows] * len(runs)):
            for n in order:
                while left[n] and left[n][0][1] <= min(room, bounds[n] - taken[n]):
                    number, rows = left[n].pop(0)
                    found.append((n, number))
                    taken[n], room = taken[n] + rows, room - rows
        return [(runs[n], number) for n, number in found]

    def _room(self, runs: list[SchedulerEntry], works: list[SchedulerEntry]) -> int:
        """Rows of a pass that searches get together beside the others."""
        if self.seconds is None or not works:
            return self.rows
        if len(works) < len(runs):
            return self._beside.batch
        before = max((int(request.segment.positions[0]) for run in works for request in passes(run)[:1]), default=0)
        # A text that comes now waits for the end of this pass.
        seconds = min(self.seconds, _WAITS * self._beside.plain or self.seconds)
        return max(int(min(self.wide.rows(seconds, before), self.rows)), min(LEAST_ROWS, self.rows))

    def learn(self, works: int, texts: int, attended: int, seconds: float) -> None:
        """A step took so long.

        Args:
            works: Rows of searches and the like in its pass.
            texts: Rows of texts.
            attended: Tokens that they attend to, of all rows together.
            seconds: Of the step, what was done between its pass and the next included.
        """
        if texts:
            self._beside.learn(works, seconds)
        if works >= LEAST_ROWS:
            self.wide.learn(works + texts, attended, seconds)


class Beside:
    """How many rows of searches fit into passes that texts wait for.

    By what passes take with and without them. Every so many passes have none, so that this is known.

    Args:
        most: Rows of a pass.

    Attributes:
        rows: Of an average pass.
        plain: Seconds of a pass of texts alone, 0 where none was measured.
    """

    def __init__(self, most: int) -> None:
        self.rows = float(min(LEAST_ROWS, most))
        self._most = most
        self.plain = self._row = self._credit = 0.0
        self._passes = 0

    @property
    def batch(self) -> int:
        """Rows that share a pass: the first beside a text costs as much as several."""
        return max(int(self.rows), min(LEAST_ROWS, self._most))

    def ready(self, ask: int, least: int) -> bool:
        """Whether the next pass has rows for an ask.

        Args:
            ask: Rows of the next ask.
            least: Rows that searches get of an average pass in any case.
        """
        return (self._passes + 1) % _PLAIN_EVERY > 0 and self._earned(least) >= max(self.batch, ask)

    def next(self, ask: int, least: int) -> int:
        """Rows of the next pass: an ask of more than there is room for is saved for.

        Args:
            ask: Rows of the next ask.
            least: Rows that searches get of an average pass in any case.
        """
        ready, plain = self.ready(ask, least), (self._passes + 1) % _PLAIN_EVERY == 0
        self._passes += 1
        if not plain:
            self._credit = min(self._earned(least), max(self.batch, ask) + least)
        return int(self._credit) if ready else 0

    def _earned(self, least: int) -> float:
        return self._credit + max(self.rows, least)

    def spend(self, rows: int) -> None:
        """So many rows of searches are in the pass."""
        self._credit -= rows

    def learn(self, rows: int, seconds: float) -> None:
        """A pass with texts and so many rows of searches took so long."""
        if not rows:
            self.plain = seconds if not self.plain else _KEEP * self.plain + (1 - _KEEP) * seconds
        elif self.plain:
            row = max(seconds - self.plain, 0.0) / rows
            self._row = row if not self._row else _KEEP * self._row + (1 - _KEEP) * row
        if self.plain and self._row:
            self.rows = min((_SLOWER - 1) * self.plain / self._row, self._most)


_WAITS = 6
"""Passes of texts that a pass of searches alone may take: a text that comes in its middle waits for half of them."""
_SLOWER = 1.25
"""How many times as long a pass of texts takes on average with rows of searches in it."""
_PLAIN_EVERY = 16
_KEEP = 0.8


def least_rows(searches: Ordered[str], texts: Ordered[str]) -> int:
    """Rows of a pass that searches get however dear they are, as texts do: one each.

    Else those who go on beside many texts would never end. An owner's searches get no more than the owner with the most
    texts gets for these.

    Args:
        searches: Owners of the searches that wait for the pass.
        texts: Owners of the texts in it.
    """
    most = max(Counter(texts).values(), default=0)
    return sum(min(count, most) for count in Counter(searches).values())


def divided(wants: Ordered[int], rows: int) -> list[int]:
    """Max-min fair parts: no one gets more than wanted, and what some leave goes to the others.

    Args:
        wants: Rows that each one could use.
        rows: Rows there are.

    Returns:
        The part of each one; together `rows` at most.
    """
    parts, left = [0] * len(wants), rows
    for place, number in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        parts[number] = min(wants[number], left // (len(wants) - place))
        left -= parts[number]
    return parts


def fair(owners: Ordered[str], wants: Ordered[int], rows: int) -> list[int]:
    """Parts of the tasks of several owners: `divided` among the owners, and among the tasks of each.

    Args:
        owners: Whose each task is.
        wants: Rows that each task could use.
        rows: Rows there are.

    Returns:
        The part of each task; together `rows` at most.
    """
    members: dict[str, list[int]] = {}
    for number, owner in enumerate(owners):
        members.setdefault(owner, []).append(number)
    parts = [0] * len(wants)
    of_owners = divided([sum(wants[n] for n in numbers) for numbers in members.values()], rows)
    for numbers, part in zip(members.values(), of_owners, strict=True):
        for number, own in zip(numbers, divided([wants[n] for n in numbers], part), strict=True):
            parts[number] = own
    return parts


def most_nodes(run: SchedulerEntry) -> int:
    """Nodes that a text may draft in a step."""
    return run.task.request.most_drafted if isinstance(run.task, Sequence) else 0
