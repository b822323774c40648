"""A search whose branches were taken from it gets them back by reading again, and finds what it would have found."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from covering import FULL, in_turn
from decodery.core.errors import OutOfMemory
from decodery.engine import preempt
from decodery.engine.engine import Engine
from decodery.engine.preempt import read_again
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.engine.task import CoroutineTask, Lost
from decodery.models.batch import Segment
from decodery.models.cache.cache import KVCache
from decodery.models.cache.pages import resident
from decodery.sampling import Sampler
from decodery.search.base import Search
from decodery.search.beam import Beam
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer
from decodery.testing.models import Counted, to_int8
from decodery.testing.states import distance_to_fresh
from methods import DRAWING, SEARCHES, SOURCES

MODEL, OTHER = tiny_transformer(0), tiny_transformer(1)
EXACT = to_int8(MODEL)
"""Whose rows are the same to the bit whatever shares a pass, so that what is read again is what was read."""
MODELS: dict[str, Any] = {"float64": MODEL, "int8": EXACT}
KINDS = [["int8"], ["int8"], ["int8"], ["float64"]]
"""In turn: what is read again is compared to the bit where that can be."""
PROMPT = [7, 3, 9, 9, 2, 11, 14, 5, 7, 3]
SOURCED = sorted(SEARCHES.keys() - {"exact-extract", "controlled-blocks", "contrastive-search"})
"""Searches that go with any source: the others read the model's own states or probabilities."""


def request(name: str, **settings: Any) -> Request:
    sampler = Sampler.from_settings(temperature=1.0 if name in DRAWING else 0.0)
    return Request(PROMPT, **{"max_new_tokens": 8, "sampler": sampler, "eos_ids": (0, 1)} | settings)


def entered(engine: Engine, search: Search, wanted: Request) -> CoroutineTask[list[Sequence]]:
    return engine.enter(search.find(engine, wanted))


def told(job: CoroutineTask[list[Sequence]]) -> list[tuple[list[int], float | None]]:
    assert job.error is None and job.result is not None
    return [(seq.tokens, seq.score) for seq in job.result]


@cache
def known(kind: str, name: str) -> tuple[list[tuple[list[int], float | None]], int]:
    return alone(MODELS[kind], SEARCHES[name], request(name))


def alone(model: Any, search: Search, wanted: Request) -> tuple[list[tuple[list[int], float | None]], int]:
    """What the search finds by itself, and in how many steps."""
    engine, steps = Engine(model), 0
    job = entered(engine, search, wanted)
    while not job.finished:
        engine.step()
        steps += 1
    return told(job), steps


def assert_same(found: list[Any], expected: list[Any], model: Any) -> None:
    """To the bit; in floating point a row may round otherwise beside others."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == other or (model is not EXACT and one == pytest.approx(other, abs=1e-12))


def held(run: Any) -> int:
    """Bytes that the branches of a search hold."""
    return resident(cache.pages for cache in preempt.caches(run))


TURNS = [
    (name, kind) for at, name in enumerate(sorted(SEARCHES)) for kind in (tuple(MODELS) if FULL else KINDS[at % 4])
]


@pytest.mark.parametrize(("name", "kind"), TURNS)
def test_a_search_preempted_at_any_step_finds_the_same(name: str, kind: str) -> None:
    model, search, wanted = MODELS[kind], SEARCHES[name], request(name)
    expected, steps = known(kind, name)
    assert steps > 3 or name == "exact-extract"
    dropped = tried = 0
    for step in range(1, steps, 1 if FULL else 1 + steps // 4):
        counted = Counted(model)
        engine = Engine(counted, prefill_chunk=4)
        job = entered(engine, search, wanted)
        for _ in range(step):
            engine.step()
        # What runs beside the loop comes to its end before memory is given back.
        while engine._schedule.runs and engine._schedule.runs[0].blocked:
            engine.step()
        if job.finished:
            continue
        (run,) = engine._schedule.runs
        before, tried = held(run), tried + 1
        engine.preempt(job)
        engine._schedule.starting()
        dropped += before > 0 and held(run) == 0
        engine.run([job])
        assert_same(told(job), expected, model)
        for seq in job.result or ():
            assert distance_to_fresh(model, seq) <= (0 if model is EXACT else 1e-9)
        spent = run.ledger.passes["model"], run.ledger.rows["model"]
        assert spent == (len(counted.rows), sum(counted.rows))
    # At most one step in ten cannot be interrupted, and where it can be all memory is given back.
    assert tried - dropped <= max(1, tried // 10)


@pytest.mark.parametrize(("name", "kind"), TURNS)
def test_a_search_preempted_again_and_again_comes_to_its_end(name: str, kind: str) -> None:
    model, (expected, steps) = MODELS[kind], known(kind, name)
    engine, others = Engine(model, prefill_chunk=4), 0
    job = entered(engine, SEARCHES[name], request(name))
    seq = engine.submit(Request(PROMPT[:4], max_new_tokens=12))
    while not job.finished:
        engine.preempt(job)
        engine.step()
        others += 1
    engine.run([seq])
    assert_same(told(job), expected, model)
    # Branches that part at many places are read level by level.
    assert steps < others <= 8 * steps
    assert seq.generated == beside(kind)


@cache
def beside(kind: str) -> list[int]:
    return decode(MODELS[kind], [PROMPT[:4]], max_new_tokens=12)[0].generated


OVER = ("guidance", "uscd", "entropy-adaptive", "dola", "sven", "partial-attention")


# That every search runs over every source is what `test_fit.py` asks for.
@pytest.mark.parametrize(("name", "source"), in_turn(SOURCED, OVER))
def test_a_search_over_a_source_reads_every_context_again(name: str, source: str) -> None:
    # A message takes as many tokens as the source's laws leave room for.
    wanted = request(name, logits_source=SOURCES[source](OTHER), max_new_tokens=24 if name == "coupling" else 8)
    model = MODEL if source == "partial-attention" else EXACT  # which reads weights in floating point
    expected, steps = alone(model, SEARCHES[name], wanted)
    for step in range(2, steps, 5) if FULL else [max(2, steps // 2)]:
        engine = Engine(model)
        job = entered(engine, SEARCHES[name], wanted)
        for _ in range(step):
            engine.step()
        engine.preempt(job)
        engine.run([job])
        assert_same(told(job), expected, model)


def test_what_was_read_wrongly_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong on purpose: the branches get back other tokens than they had."""
    search, wanted = Beam(width=3), request("beam")
    expected, _ = alone(EXACT, search, wanted)

    def wrong(lost: list[Lost], rows: int) -> ForwardCoroutine[None]:
        return read_again([Lost(each.model, each.cache, each.tokens[::-1]) for each in lost], rows)

    monkeypatch.setattr("decodery.engine.preempt.read_again", wrong)
    engine = Engine(EXACT)
    job = entered(engine, search, wanted)
    for _ in range(4):
        engine.step()
    engine.preempt(job)
    engine.run([job])
    with pytest.raises(AssertionError):
        assert_same(told(job), expected, EXACT)


def test_what_branches_have_in_common_is_read_once_and_within_the_rows_of_a_pass() -> None:
    long = [3, 1, 4, 1, 5, 9, 2, 6] * 40
    wanted = Request(long, max_new_tokens=12)
    expected, _ = alone(MODEL, Beam(width=6), wanted)
    model = Counted(MODEL)
    engine = Engine(model, prefill_chunk=64, limits=Limits(rows=100))
    job = entered(engine, Beam(width=6), wanted)
    while not job.finished and not (engine._schedule.runs and engine._schedule.runs[0].depth == 12):
        engine.step()
    (run,) = engine._schedule.runs
    before, read = held(run), sum(model.rows)
    engine.preempt(job)
    engine.step()
    most = 0
    while run.waiting is not None:
        engine.step()
        most = max(most, held(run))
    again = sum(model.rows) - read
    engine.run([job])
    assert told(job)[0][0] == expected[0][0]
    # Six branches of a few tokens each after one prompt.
    assert len(long) <= again <= len(long) + 6 * 10
    assert max(model.rows) <= 100 and most <= 1.3 * before
    assert run.ledger.rows == {"model": sum(model.rows)}


def test_a_search_waits_for_memory_and_gives_it_back() -> None:
    prompts = [[1 + number, 2, 3, 5] for number in range(4)]

    def search(engine: Engine, prompt: list[int]) -> CoroutineTask:
        return entered(engine, Beam(width=8), Request(prompt, max_new_tokens=24))

    peaks = []
    for prompt in prompts[1:3]:
        engine = Engine(MODEL, limits=Limits(cache_bytes=1 << 30))
        engine.run([search(engine, prompt)])
        limit = engine._schedule.memory.limit
        assert limit is not None
        peaks.append(limit.peak)
    # As much as one search needs, which four tasks have to share.
    engine = Engine(MODEL, limits=Limits(cache_bytes=max(peaks)))
    texts = [engine.submit(Request(prompt, max_new_tokens=24)) for prompt in (prompts[0], prompts[3])]
    jobs = [search(engine, prompt) for prompt in prompts[1:3]]
    limit, put_off = engine._schedule.memory.limit, 0
    assert limit is not None
    while any(not task.finished for task in (*texts, *jobs)):
        engine.step()
        runs = engine._schedule._waiting
        put_off += any(isinstance(run.task, CoroutineTask) and run.lost for run in runs)
        assert limit.used <= limit.peak <= max(peaks)
    assert put_off > 0
    for job, prompt in zip(jobs, prompts[1:3], strict=True):
        assert_same(told(job), alone(MODEL, Beam(width=8), Request(prompt, max_new_tokens=24))[0], MODEL)
    plain = decode(MODEL, [prompts[0], prompts[3]], max_new_tokens=24)
    assert [text.generated for text in texts] == [run.generated for run in plain]
    one = next(iter(limit.pools.values())).page_bytes
    engine = Engine(MODEL, limits=Limits(cache_bytes=peaks[0] - one))
    with pytest.raises(OutOfMemory, match="no memory for a key-value cache"):
        engine.run([search(engine, prompts[1])])


def broke(monkeypatch: pytest.MonkeyPatch, poor: set[int], calls: list[int]) -> None:
    """From now on there is no memory for these caches while others are in progress."""
    reserve = KVCache.reserve

    def limited(self: KVCache, *settings: Any, **more: Any) -> None:
        if id(self) in poor:
            calls.append(id(self))
            raise OutOfMemory("no memory for this one")
        reserve(self, *settings, **more)

    monkeypatch.setattr(KVCache, "reserve", limited)


def test_a_search_without_memory_waits_for_others_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request("beam", max_new_tokens=20)
    expected, _ = alone(MODEL, Beam(width=3), wanted)
    counted = Counted(MODEL)
    engine = Engine(counted)
    text = engine.submit(Request([1, 2, 3], max_new_tokens=15))
    job = entered(engine, Beam(width=3), wanted)
    for _ in range(5):
        engine.step()
    run = engine._schedule.runs[1]
    poor, calls = {id(run.requests[0].segment.cache)}, list[int]()
    broke(monkeypatch, poor, calls)
    while not text.finished:
        engine.step()
        # It holds nothing and asks for nothing while it waits.
        assert not job.finished and held(run) == 0 and len(calls) == 2
    poor.clear()
    engine.run([text, job])
    assert_same(told(job), expected, MODEL)
    assert text.generated == decode(MODEL, [[1, 2, 3]], max_new_tokens=15)[0].generated


def test_a_search_without_memory_fails_where_nobody_can_give_any_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODEL)
    job = entered(engine, Beam(width=3), request("beam"))
    for _ in range(3):
        engine.step()
    (run,) = engine._schedule.runs
    broke(monkeypatch, {id(run.requests[0].segment.cache)}, [])
    with pytest.raises(OutOfMemory, match="no memory for this one"):
        engine.run([job])


def test_a_preempted_search_can_be_paused_and_cancelled() -> None:
    wanted = request("smc", max_new_tokens=20)
    expected, _ = alone(EXACT, SEARCHES["smc"], wanted)
    engine = Engine(EXACT)
    job, other = (entered(engine, SEARCHES["smc"], wanted) for _ in range(2))
    for _ in range(4):
        engine.step()
    engine.preempt(job)
    job.paused = True
    for _ in range(3):
        engine.step()
    job.paused = False
    engine.step()
    engine.preempt(other)
    engine.step()
    other.cancel()
    engine.run([job, other])
    assert_same(told(job), expected, EXACT)
    assert other.result is None


def test_what_keeps_caches_of_its_own_is_left_alone() -> None:
    """A task whose caches no branch has cannot be read again, and so is not dropped."""

    def reading() -> ForwardCoroutine[list[float]]:
        cache, found = MODEL.new_cache(), list[float]()
        for token in PROMPT:
            scored = yield from score(MODEL, Segment.chunk([token], cache))
            cache.keep([0])
            found.append(float(scored.logits.sum()))
        return found

    results = []
    for preempted in (False, True):
        engine = Engine(MODEL, limits=Limits(cache_bytes=64 * MODEL.new_cache().slot_bytes) if preempted else None)
        job = engine.enter(reading())
        while not job.finished:
            if preempted:
                engine.preempt(job)
            engine.step()
        results.append(job.result)
    assert results[0] == results[1]


def test_groups_part_where_their_tokens_do() -> None:
    def lost(*tokens: int) -> Lost:
        return Lost(MODEL, MODEL.new_cache(), list(tokens))

    assert preempt._alike([lost(1, 2, 3), lost(1, 2), lost(1, 2, 4)]) == 2
    assert preempt._alike([lost(1, 2, 3)]) == 3 and preempt._alike([lost(4), lost(5)]) == 0
