"""Taking from tasks what models have read for them, and having it read again: their results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from contextlib import suppress

from decodery.models.batch import Segment
from decodery.models.cache.account import resident
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import Reader
from decodery.step.forward_request import Blocking, ForwardCoroutine, ForwardRequest, gather, score_all
from decodery.step.sequence import Sequence

from .task import CoroutineTask, Lost, SchedulerEntry


def drop(run: SchedulerEntry) -> bool:
    """Give back the memory that models take for a task.

    False where that must wait for the end of what it is doing. A text reads itself again, because nothing of it is read
    then. What the branches of a search had read is noted in `run.lost`. That waits while rows are tentative or hold
    tokens that their branch does not know of yet, and while a search is read again or has not gone on since: however
    often it is dropped, it comes to its end. A search of which something was evicted, or whose prompt holds embeddings,
    is left as it is. A canvas has its own way of remembering, `CoroutineTask.memory`.
    """
    if isinstance(run.task, Sequence):
        return run.coroutine is None and _drop_text(run.task)
    if run.restored or run.waiting is not None or run.blocked:
        return False
    if any(request.segment.interventions for request in passes(run)):
        return False
    if run.task.memory is not None:
        freed = not run.forgotten and run.task.memory.give_back()
        run.forgotten = run.forgotten or freed
        return freed
    if any(seq.request.prompt_embeds is not None for seq in run.branches.values()):
        return False
    readings = {id(each.cache): each for seq in run.branches.values() for each in _readings(seq)}.values()
    if any(_cannot_be_read_again(each) for each in readings):
        return False
    run.owed += resident(each.cache for each in readings)
    for each in readings:
        if each.tokens:
            run.lost.append(each)
            each.cache.become(each.model.new_cache())
    return True


def withdraw(run: SchedulerEntry) -> bool:
    """Take back what a task has asked for and give back the memory that models take for it.

    False where that cannot be. A text begins its turn anew, and one that could not be read again keeps its memory. The
    asks of a search stay, to be answered once it has its branches back; what was answered of them is forgotten.
    """
    if run.blocked:
        return False
    if isinstance(run.task, Sequence):
        run.stop()
        if not drop(run) and run.task.request.drafter is not None:
            run.task.request.drafter.forget(run.task)
        return True
    if any(request.segment.retained for request in passes(run)):
        return False
    run.abandon()
    run.restored = False
    for request in passes(run):
        if request.segment.cache is not None:
            request.segment.cache.keep([])
    # What ran beside the loop has ended once, with a result or an error, and is not begun again.
    run.results = [
        each if isinstance(request, Blocking) else None for request, each in zip(run.requests, run.results, strict=True)
    ]
    return drop(run)


def let_go(run: SchedulerEntry) -> None:
    """Give back what models and drafters hold for a task that has ended."""
    for seq in [run.task] if isinstance(run.task, Sequence) else run.branches.values():
        _empty(seq)
        if seq.request.drafter is not None:
            # It has ended, whatever the drafter makes of that.
            with suppress(Exception):
                seq.request.drafter.forget(seq)


def passes(run: SchedulerEntry) -> list[ForwardRequest]:
    """What a task asks of models."""
    return [request for request in run.requests if not isinstance(request, Blocking)]


def again(run: SchedulerEntry, rows: int) -> ForwardCoroutine[None]:
    """Have all that was taken from a task, by passes of `rows` rows at most where they can be cut."""
    if run.forgotten:
        assert isinstance(run.task, CoroutineTask) and run.task.memory is not None
        yield from run.task.memory.recover()
    if run.lost:
        yield from read_again(run.lost, rows)


def read_again(lost: Ordered[Lost], rows: int) -> ForwardCoroutine[None]:
    """Fill caches with what they held, by passes of `rows` rows at most.

    What they have in common is read once.
    """
    models: dict[int, list[Lost]] = {}
    for each in lost:
        models.setdefault(id(each.model), []).append(each)
    yield from gather([_read(those[0].model, those, max(rows // len(models), 1)) for those in models.values()])


def _read(model: Reader, lost: list[Lost], rows: int) -> ForwardCoroutine[None]:
    """Level by level: caches whose tokens go on alike share one, until they part and each has a fork of it."""
    groups = [(model.new_cache(), lost)]
    while groups := [part for cache, members in groups for part in _parted(cache, members)]:
        left, segments = rows, []
        for cache, members in groups:
            start = cache.next_position
            chunk = members[0].tokens[start : min(_alike(members), start + left)]
            if not chunk:
                break
            segments.append(Segment.chunk(chunk, cache, logit_rows=[]))
            left -= len(chunk)
        yield from score_all(model, segments, role=lost[0].role)
        for (cache, _), segment in zip(groups, segments, strict=False):
            cache.keep(range(len(segment)))


def _parted(cache: KVCache, members: list[Lost]) -> Iterator[tuple[KVCache, list[Lost]]]:
    """Groups that go on with different tokens after what `cache` holds; whoever has no more gets a fork of it."""
    at, following = cache.next_position, dict[int, list[Lost]]()
    for each in members:
        if len(each.tokens) == at:
            each.cache.become(cache.fork())
        else:
            following.setdefault(each.tokens[at], []).append(each)
    for those in following.values():
        yield (cache if len(following) == 1 else cache.fork()), those


def _alike(members: list[Lost]) -> int:
    """How many of their first tokens are the same in all."""
    first, last = min(each.tokens for each in members), max(each.tokens for each in members)
    shorter = min(len(first), len(last))
    return next((at for at in range(shorter) if first[at] != last[at]), shorter)


def _readings(seq: Sequence) -> list[Lost]:
    """Every cache after a text, whose it is, and which tokens it holds."""
    if isinstance(seq.cache, KVCache):
        return [Lost(seq.request.model, seq.cache, seq.tokens[: seq.cache.next_position], seq.request.role)]
    return [Lost(model, cache, tokens) for model, cache, tokens in seq.cache.readings()]


def caches_of(seq: Sequence) -> list[KVCache]:
    """All caches that a text reads through."""
    if isinstance(seq.cache, KVCache):
        return [seq.cache]
    return [cache for _, cache, _ in seq.cache.readings()]


def caches(run: SchedulerEntry) -> list[KVCache]:
    """All that a task has, those that nothing was asked with yet included."""
    texts = [run.task] if isinstance(run.task, Sequence) else list(run.branches.values())
    readings = {id(cache): cache for seq in texts for cache in caches_of(seq)}
    return list((readings | {id(cache): cache for cache in run.caches}).values())


def _cannot_be_read_again(readings: Lost) -> bool:
    cache = readings.cache
    return bool(cache.tentative) or cache.next_position > len(readings.tokens) or not cache.plain


def _drop_text(seq: Sequence) -> bool:
    if not all(cache.anew for cache in caches_of(seq)):
        return False
    _empty(seq)
    seq.cache = seq.request.model.new_cache()
    if seq.request.slots is not None:
        seq.cache.provide(seq.request.slots)
    if seq.request.drafter is not None:
        seq.request.drafter.forget(seq)
    return True


def _empty(seq: Sequence) -> None:
    """Let every cache that a text reads through hold nothing, whoever still knows of it."""
    for each in _readings(seq):
        each.cache.become(each.model.new_cache())
