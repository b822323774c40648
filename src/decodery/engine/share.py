"""How the rows of a pass are divided: owners get equal parts, and so do the tasks of each owner."""

from __future__ import annotations

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

    `wide` is what passes of searches have taken.

    Args:
        rows: Of a pass at most.
        seconds: That a pass with a search in it is to take where others wait for it; None for no bound.
        chunk: Rows of a prompt in one pass.
    """

    def __init__(self, rows: int, seconds: float | None, chunk: int) -> None:
        self.rows = rows
        self.seconds = seconds
        self.wide = Pace()
        self._chunk = chunk

    def taken(self, runs: list[SchedulerEntry], begins: list[SchedulerEntry]) -> int:
        """Rows of the next pass that belong to those of these tasks that do not begin a turn now."""
        beginning = set(map(id, begins))
        if len(beginning) == len(runs):
            return 0
        wants = [self._wanted(run) if id(run) in beginning else _rows(run) for run in runs]
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
        return max(1, min(parts[runs.index(run)], self._beside_others(runs)))

    def places(self, asked: list[tuple[SchedulerEntry, list[int]]]) -> list[Place]:
        """Which of these asks share the next pass, by their tasks and numbers.

        The others wait for a later one. The longest waiting one gets one in any case. The other rows are divided
        fairly, and a search gets no more of them than what others can wait for.
        """
        runs = [run for run, _ in asked]
        bounded = (
            len(runs) > 1 and self.seconds is not None and any(isinstance(run.task, CoroutineTask) for run in runs)
        )
        if not bounded and sum(map(_rows, runs)) <= self.rows:
            return [(run, number) for run, numbers in asked for number in numbers]
        left = [[(number, len(run.requests[number].segment)) for number in numbers] for run, numbers in asked]
        most = self._beside_others(runs) if bounded else self.rows
        caps = [most if isinstance(run.task, CoroutineTask) else self.rows for run in runs]
        wants = [sum(rows for _, rows in each) for each in left]
        if sum(wants) <= self.rows and all(want <= cap for want, cap in zip(wants, caps, strict=True)):
            return [(run, number) for run, numbers in asked for number in numbers]
        order = sorted(range(len(runs)), key=lambda n: runs[n].served)
        number, rows = left[order[0]].pop(0)
        found, taken = [(order[0], number)], [0] * len(runs)
        taken[order[0]] = rows
        room = max(self.rows - rows, 0)
        wants[order[0]] -= rows
        parts = fair(
            [run.owner for run in runs],
            [max(min(w, c - t), 0) for w, c, t in zip(wants, caps, taken, strict=True)],
            room,
        )
        # Rows of an ask stand together, so that parts are not filled to the last row: what is left then goes to
        # whoever can use it.
        for bounds in ([had + part for had, part in zip(taken, parts, strict=True)], caps):
            for n in order:
                while left[n] and left[n][0][1] <= min(room, bounds[n] - taken[n]):
                    number, rows = left[n].pop(0)
                    found.append((n, number))
                    taken[n], room = taken[n] + rows, room - rows
        return [(runs[n], number) for n, number in sorted(found)]

    def _beside_others(self, runs: list[SchedulerEntry]) -> int:
        """Rows that each of the searches among these tasks gets at most in a pass that others wait for."""
        works = [run for run in runs if isinstance(run.task, CoroutineTask)]
        if self.seconds is None or not works:
            return self.rows
        before = max((int(request.segment.positions[0]) for run in works for request in passes(run)[:1]), default=0)
        rows = min(self.wide.rows(self.seconds, before), self.rows)
        return max(int(rows) // len(works), min(LEAST_ROWS, self.rows))


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
    return (
        run.task.request.max_draft_tokens
        if isinstance(run.task, Sequence) and run.task.request.drafter is not None
        else 0
    )


def _rows(run: SchedulerEntry) -> int:
    """Rows that a task waits for."""
    return sum(len(run.requests[number].segment) for number in run.unanswered)
