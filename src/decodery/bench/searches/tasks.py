"""Searches on problems, several of which share their passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import suppress
from dataclasses import dataclass

from decodery.core.errors import DecoderyError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.task import CoroutineTask
from decodery.search.base import Search
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .pooled import Found, Pooled

Run = tuple[str, int]
"""A search and its budget."""
_TEXTS = 16
"""Texts that share passes: more of them hardly write faster on a CPU."""


@dataclass(frozen=True)
class Task:
    """One search, or the samples of several, on one problem.

    Attributes:
        number: Of the problem.
        runs: What it is: several of them in a pool of samples.
        search: What is run.
        request: Makes the request that it answers; one that cannot be made fails the task alone.
    """

    number: int
    runs: Ordered[Run]
    search: Search
    request: Callable[[], Request]


@dataclass(frozen=True)
class Done:
    """What one run found for one problem.

    Attributes:
        number: Of the problem.
        run: The search and its budget.
        found: What it found.
        seconds: The batch's time, by the share of its tokens.
    """

    number: int
    run: Run
    found: Found
    seconds: float


def batches(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    """Tasks in their order, as many together as share passes well."""
    batch: list[Task] = []
    texts = 0
    for task in tasks:
        if batch and texts + task.search.texts_at_once > _TEXTS:
            yield batch
            batch, texts = [], 0
        batch.append(task)
        texts += task.search.texts_at_once
    if batch:
        yield batch


def run_together(engine: Engine, tasks: Ordered[Task]) -> list[Done]:
    """Run tasks to their ends in common passes; one that fails leaves the others as they are."""
    begun = time.monotonic()
    jobs = [engine.enter(_find(engine, task)) for task in tasks]
    # All end; which one failed stands below.
    with suppress(DecoderyError):
        engine.run(jobs)
    seconds = time.monotonic() - begun
    found = [_found(task, job) for task, job in zip(tasks, jobs, strict=True)]
    # The budgets of a pool write the same samples.
    tokens = sum(max(each.tokens for each in own) for own in found)
    return [
        Done(task.number, run, each, seconds * each.tokens / max(tokens, 1))
        for task, own in zip(tasks, found, strict=True)
        for run, each in zip(task.runs, own, strict=True)
    ]


def _find(engine: Engine, task: Task) -> ForwardCoroutine[list[Sequence]]:
    return (yield from task.search.find(engine, task.request()))


def _found(task: Task, job: CoroutineTask[list[Sequence]]) -> list[Found]:
    """What each run of a task found."""
    if isinstance(job.error, DecoderyError):
        return [Found.failed(job.error)] * len(task.runs)
    if job.error is not None:
        raise job.error
    if isinstance(task.search, Pooled):
        return task.search.found
    best = (job.result or [])[0]
    ledger, text = best.trace.ledger, "" if best.text is None else best.text.text
    return [Found(text, ledger.tokens, ledger.scorer_calls, lost="cut" in ledger.counts)]
