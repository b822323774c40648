"""Pages never exceed the memory limit, whatever arrives, forks, evicts, is preempted or leaves; texts are plain."""

from __future__ import annotations

import gc
import random
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch

from decodery.core.errors import OutOfMemory
from decodery.engine.engine import Engine
from decodery.engine.preempt import caches
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.kv_cache.d2o import D2O
from decodery.kv_cache.expected_attention import ExpectedAttention
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.quantized import Quantized
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.snapkv import SnapKV
from decodery.kv_cache.streaming_llm import StreamingLLM
from decodery.models.cache.account import resident_beside
from decodery.models.cache.cache import KVCache
from decodery.models.cache.memory_limit import MemoryLimit
from decodery.models.cache.page_pool import pool_of
from decodery.search.beam import Beam
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer
from decodery.testing.models import to_int8

MODEL, SMALL = (to_int8(tiny_transformer(seed, num_layers=1, max_positions=256)) for seed in (0, 1))
SHORT = [int(token) for token in np.random.default_rng(4).integers(0, 64, 40)]
BOUND = 200 * MODEL.new_cache().slot_bytes
POLICIES: list[Any] = [
    None,
    None,
    None,
    H2O(budget=0.5),
    D2O(budget=0.5, dense=0),
    SnapKV(budget=0.5),
    ExpectedAttention(budget=0.5),
    Quantized(8, group=8, residual=16),
    StreamingLLM(budget=30, sinks=4),
    Quest(20),
]
DRAFTERS: list[Any] = [None, None, PromptLookup(), DraftModel(SMALL)]


class Unbounded(MemoryLimit):
    """Admits whatever is taken: tasks are admitted by the limit, and grow beyond it."""

    def allows(self, more: int) -> bool:
        self.peak = max(self.peak, self.used + more)
        return True


def wanted(chance: random.Random) -> Request:
    """A text that fits alone."""
    length, policy = chance.choice([3, 17, 60, 90]), chance.choice(POLICIES)
    drafter = chance.choice(DRAFTERS) if policy is None else chance.choice(DRAFTERS[:3])
    settings = {} if drafter is None else {"max_draft_tokens": 4}
    prompt = [*SHORT[: length // 2], *(chance.randrange(64) for _ in range(length - length // 2))]
    return Request(prompt, max_new_tokens=chance.randrange(2, 30), cache_policy=policy, drafter=drafter, **settings)


def allocated(limit: MemoryLimit) -> int:
    """Bytes of pages that somebody holds, counted from the pools."""
    return sum(int(np.count_nonzero(pool.holders)) * pool.page_bytes for pool in list(limit.pools.values()))


def traffic(engine: Engine, seed: int) -> list[tuple[Request, Sequence]]:
    """Random arrivals, forks, preemptions and searches, to the end of all of them."""
    chance, limit = random.Random(seed), engine._schedule.memory.limit
    assert limit is not None
    texts: list[tuple[Request, Sequence]] = []
    tasks: list[Any] = []
    for step in range(400):
        running = [(request, text) for request, text in texts if not text.finished]
        match chance.randrange(8) if step < 36 else None:
            case 0 | 1 | 2:
                texts.append((request := wanted(chance), engine.submit(request)))
            case 3 if running:
                request, text = chance.choice(running)
                if request.drafter is None and not engine._schedule.busy(text):
                    texts.append((request, engine.fork(text)))
            case 4 if running:
                engine.preempt(chance.choice(running)[1])
            case 5 if len(tasks) < 2:
                tasks.append(engine.enter(Beam(width=3).find(engine, Request(SHORT[:20], max_new_tokens=12))))
            case 6 if running and chance.random() < 0.3:
                chance.choice(running)[1].cancel()
            case None if not running and all(task.finished for task in tasks):
                break
        engine.step()
        assert limit.used >= allocated(limit) == limit.used - limit.beside
        runs = engine._schedule.runs
        assert allocated(limit) + resident_beside(cache for run in runs for cache in caches(run)) <= BOUND
    assert all(text.finished for _, text in texts) and all(task.finished for task in tasks)
    for task in tasks:
        assert task.error is None
    return texts


def engine_with(limit: type[MemoryLimit]) -> Engine:
    prefixes = PrefixCache(BOUND)
    engine = Engine(MODEL, limits=Limits(cache_bytes=BOUND), prefixes=prefixes, prefill_chunk=48)
    engine._schedule.memory.limit = limit(BOUND, prefixes.evict)
    return engine


@pytest.mark.parametrize("seed", range(2))
def test_no_traffic_exceeds_the_limit_by_a_page(seed: int) -> None:
    engine = engine_with(MemoryLimit)
    texts, limit = traffic(engine, seed), engine._schedule.memory.limit
    assert limit is not None and 0.9 * BOUND < limit.peak <= BOUND and engine.preemptions
    unbounded = Engine(MODEL, prefill_chunk=48)
    expected = {id(request): unbounded.submit(request) for request, _ in texts}
    unbounded.run(expected.values())
    for request, text in texts:
        assert text.error is None
        again = expected[id(request)]
        assert again.generated[: text.position] == text.generated
        assert len(text.generated) == len(again.generated) or text.finish_reason == "cancelled"
    # What is left is what is kept for later texts.
    assert engine._schedule.prefixes is not None
    del texts
    gc.collect()
    assert engine.held_bytes == engine._schedule.prefixes.bytes
    engine._schedule.prefixes.clear()
    assert engine.held_bytes == 0


def test_tasks_would_exceed_a_limit_that_refuses_nothing() -> None:
    engine = engine_with(Unbounded)
    traffic(engine, 0)
    limit = engine._schedule.memory.limit
    assert limit is not None and limit.peak > BOUND


@pytest.mark.parametrize("request_", [Request(SHORT * 6, max_new_tokens=4), Request(SHORT * 4, max_new_tokens=90)])
def test_a_text_that_needs_more_than_there_is_fails_alone(request_: Request) -> None:
    engine = engine_with(MemoryLimit)
    other = engine.submit(Request(SHORT, max_new_tokens=8))
    with pytest.raises(OutOfMemory):
        engine.run([engine.submit(request_)])
    engine.run([other])
    assert other.error is None and len(other.generated) == 8


def test_a_refusal_holds_nothing_of_its_callers() -> None:
    with MemoryLimit(1).within():
        pool = pool_of(16, torch.float32, "cpu")

    def refused() -> ReferenceType[frozenset[int]]:
        held = frozenset([1])
        with suppress(OutOfMemory):
            pool.take(1)
        return ref(held)

    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_pages_that_only_cycles_hold_are_freed_before_a_text_fails() -> None:
    engine = engine_with(MemoryLimit)
    limit = engine._schedule.memory.limit
    assert limit is not None
    gc.disable()
    try:
        with limit.within():
            cycle: list[Any] = [MODEL.new_cache()]
        cycle[0].make_room(BOUND // cycle[0].slot_bytes - 16)
        cycle.append(cycle)
        del cycle
        text = engine.submit(Request(SHORT, max_new_tokens=8))
        engine.run([text])
    finally:
        gc.enable()
    assert text.error is None and len(text.generated) == 8


def test_caches_that_are_made_in_arrays_and_by_forks_count() -> None:
    engine = engine_with(MemoryLimit)
    limit = engine._schedule.memory.limit
    ended = engine.submit(Request(SHORT, max_new_tokens=8))
    engine.run([ended])
    text = engine.submit(Request(SHORT, max_new_tokens=12))
    for _ in range(4):
        engine.step()
    for each in (ended, text, engine.fork(text)):
        assert isinstance(each.cache, KVCache) and each.cache.pages.pool.limit is limit
