"""Texts in arrays under a memory limit: a step looks at none of them, also with stored prefixes and waiting tasks."""

from __future__ import annotations

from collections import Counter

import pytest

from count_calls import counted_calls
from decodery.engine.array_batch import ArrayBatch
from decodery.engine.engine import Engine
from decodery.engine.memory import MemoryBudget
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits, Schedule
from decodery.models.cache.cache import KVCache
from decodery.models.cache.open_rows import OpenRows
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.sequence import Sequence
from decodery.testing import tiny_transformer, to_int8

MODEL = to_int8(tiny_transformer(3, max_positions=1024))
SLOT = MODEL.new_cache().slot_bytes
TEXTS, STEPS = 12, 48


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often memory of one text was looked at, and how often tasks were looked through."""
    found = Counter[str]()
    more_for, starting = KVCache.more_for, Schedule.starting

    def counted_more(cache: KVCache, tokens: int, rows: int = 1, chunk: int | None = None) -> int:
        found["texts"] += 1
        return more_for(cache, tokens, rows, chunk)

    def counted_starting(schedule: Schedule) -> list[object]:
        found["steps"] += 1
        return [*starting(schedule)]

    monkeypatch.setattr(KVCache, "more_for", counted_more)
    monkeypatch.setattr(Schedule, "starting", counted_starting)
    return found


def writing(engine: Engine, owner: str = "") -> list[Sequence]:
    """Texts of different lengths, so that one of them needs a page in nearly every step, once they write."""
    requests = [
        Request([5] * (33 + number), max_new_tokens=80, seed=number, cache_namespace=owner) for number in range(TEXTS)
    ]
    texts = [engine.submit(request) for request in requests]
    while any(text.position < 4 for text in texts):
        engine.step()
    return texts


def taken(engine: Engine, looked: Counter[str]) -> Counter[str]:
    """What some steps look at."""
    looked.clear()
    for _ in range(STEPS):
        engine.step()
    return Counter(looked)


def same(texts: list[Sequence]) -> None:
    """Texts are those of an engine without a limit."""
    free = Engine(MODEL)
    expected = [free.submit(Request(text.tokens[: text.request.prompt_length], max_new_tokens=80)) for text in texts]
    free.run(expected)
    assert all(each.tokens[: len(text.tokens)] == text.tokens for text, each in zip(texts, expected, strict=True))


def test_a_step_looks_at_no_text_while_all_that_they_take_fits(looked: Counter[str]) -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=TEXTS * 400 * SLOT))
    texts = writing(engine)
    assert not taken(engine, looked)
    same(texts)


def test_what_is_kept_goes_without_a_look_at_texts(looked: Counter[str]) -> None:
    limit = TEXTS * 110 * SLOT
    engine = Engine(MODEL, limits=Limits(cache_bytes=limit), prefixes=PrefixCache(limit))
    for number in range(10):
        engine.run([engine.submit(Request([7 + number] * 200, max_new_tokens=1))])
    prefixes = engine._schedule.prefixes
    assert prefixes is not None
    texts, kept = writing(engine), prefixes.bytes
    assert not taken(engine, looked)
    assert prefixes.bytes < kept and engine.held_bytes > 0.8 * limit
    same(texts)


def calls(texts: int, waiting: int = 0) -> float:
    """Calls in a step of so many texts beside so many that wait for memory, on average over some pages."""
    room = (texts * 120 + 600) * SLOT
    engine = Engine(MODEL, limits=Limits(cache_bytes=room))
    seqs = [engine.submit(Request([5] * (33 + number % 16), max_new_tokens=100)) for number in range(texts)]
    while any(seq.position < 4 for seq in seqs):
        engine.step()
    spare = (room - engine.held_bytes) // SLOT
    for number in range(waiting):
        engine.submit(Request([9] * (spare + 1 + number), max_new_tokens=2))
    engine.step()
    engine.step()
    assert len(engine._arrays) == texts and engine.waiting == waiting
    return counted_calls(engine.step, 32)


def test_a_step_under_a_limit_calls_little_for_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What texts need in a step is taken at once for all of them, and nothing before it is needed."""
    one, many = calls(1), calls(64)
    assert many <= 3 * one < 150
    # Wrong: each text takes its pages by itself.
    monkeypatch.setattr(OpenRows, "missing", lambda rows, more: 0)
    assert calls(64) > 300


def test_no_pages_are_taken_before_they_are_needed() -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=TEXTS * 400 * SLOT))
    texts = writing(engine)
    for _ in range(STEPS):
        engine.step()
        assert len(engine._arrays) == TEXTS
        assert all(text.cache.capacity - text.cache.next_position < 16 for text in texts)
        assert engine.held_bytes == sum(text.cache.capacity for text in texts) * SLOT
        # What a text has held at most is known of each by itself.
        assert all(text.trace.ledger.bytes == text.cache.bytes for text in texts)


def calls_beside_a_prompt(limits: Limits | None, waiting: int = 0) -> float:
    """Calls in a step of 64 texts beside one that reads, and so many that wait for memory."""
    engine = Engine(MODEL, limits=limits, prefill_chunk=32)
    texts = [engine.submit(Request([5] * 16, max_new_tokens=100)) for _ in range(64)]
    while any(text.position < 4 for text in texts):
        engine.step()
    for length in [850, *[1020] * waiting]:
        engine.submit(Request([9] * length, max_new_tokens=2))
    engine.step()
    engine.step()
    assert len(engine._arrays) == 64 and engine.running == 65 and engine.waiting == waiting
    return counted_calls(engine.step, 16)


def test_beside_a_prompt_a_limit_adds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What texts in arrays take next is known without a look at each, and tasks that were refused are not looked at."""
    limits = Limits(cache_bytes=(64 * 48 + 800) * SLOT)
    free = calls_beside_a_prompt(None)
    assert calls_beside_a_prompt(limits, waiting=8) <= 1.5 * free
    # Wrong: each text is looked at.
    monkeypatch.setattr(ArrayBatch, "_due", lambda batch: {})
    assert calls_beside_a_prompt(limits, waiting=8) > 2 * free


def test_what_texts_in_arrays_take_next_is_what_they_lack() -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=TEXTS * 400 * SLOT))
    texts = writing(engine)
    drafted = {"drafter": PromptLookup(), "max_draft_tokens": 20}
    texts += [engine.submit(Request([5, 6] * 9, max_new_tokens=30 + length, **drafted)) for length in range(3)]
    lacking = 0
    while any(not text.finished for text in texts):
        memory, known = engine._schedule.memory, engine._arrays._due()
        due = {id(run): memory._due_of(run) for run in engine._schedule.runs}
        assert known == {key: due[key] for key in known}
        lacking += sum(each > 0 for each in known.values())
        engine.step()
    assert lacking > TEXTS


def full(engine: Engine) -> Sequence:
    """A text that there is no memory for beside those that write."""
    waits = engine.submit(Request([9] * 900, max_new_tokens=2))
    for _ in range(2):
        engine.step()
    assert engine.waiting == 1 and len(engine._arrays) == TEXTS
    return waits


def test_who_waits_for_memory_keeps_no_text_out_of_the_arrays(looked: Counter[str]) -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=TEXTS * 120 * SLOT))
    texts = writing(engine)
    waits = full(engine)
    assert not taken(engine, looked)
    engine.run([*texts, waits])
    assert len(waits.generated) == 2
    same([*texts, waits])


def test_who_waits_comes_in_once_memory_was_given_back() -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=TEXTS * 120 * SLOT))
    texts = writing(engine)
    waits = full(engine)
    for text in texts[4:]:
        text.cancel()
    for _ in range(8):
        engine.step()
    assert not engine.waiting and waits.finished and not texts[0].finished


def test_no_more_texts_are_put_off_than_memory_is_missing_for() -> None:
    """What one of them gives back is free at once, though the arrays have known where it was."""
    engine = Engine(MODEL, limits=Limits(cache_bytes=TEXTS * 100 * SLOT))
    texts = writing(engine)
    while not any(text.finished for text in texts):
        engine.step()
    assert 0 < engine.preemptions <= 3
    engine.run(texts)
    same(texts)


def test_an_owner_that_grows_too_large_makes_room_for_others() -> None:
    limits = Limits(cache_bytes=TEXTS * 130 * SLOT, owner_part=0.75)
    engine = Engine(MODEL, limits=limits)
    texts = writing(engine, "many")
    budget: MemoryBudget = engine._schedule.memory
    other = engine.submit(Request([9] * 990, max_new_tokens=2, cache_namespace="other"))
    engine.step()
    assert engine.waiting == 1
    while not other.finished and not all(text.finished for text in texts):
        engine.step()
        held = budget.by_owner(engine._schedule.runs).values()
        assert max(held, default=0) <= (0.75 * TEXTS * 130 + 16 * TEXTS) * SLOT
    assert engine.preemptions


def test_who_waits_comes_in_once_the_one_before_is_cancelled() -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=4 * 220 * SLOT))
    texts = [engine.submit(Request([5] * (33 + number), max_new_tokens=400, seed=number)) for number in range(4)]
    while any(text.position < 4 for text in texts):
        engine.step()
    large, small = (engine.submit(Request([9] * length, max_new_tokens=2)) for length in (800, 20))
    for _ in range(4):
        engine.step()
    assert not small.position, "the larger one comes first, and there is no memory for it"
    large.cancel()
    for _ in range(8):
        engine.step()
    assert small.finish_reason == "length" and not any(text.finished for text in texts) and not engine.waiting


def test_drafts_are_trimmed_without_a_look_at_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages are there already, a step asks for no memory but that of logits."""
    asked, due = list[int](), ArrayBatch._due

    def counted(batch: ArrayBatch) -> dict[int, int]:
        asked.append(len(batch))
        return due(batch)

    monkeypatch.setattr(ArrayBatch, "_due", counted)
    engine = Engine(MODEL, limits=Limits(cache_bytes=400 * SLOT))
    text = engine.submit(Request([5] * 40, max_new_tokens=100, drafter=PromptLookup(length=2)))
    while text.position < 4:
        engine.step()
    asked.clear()
    before = len(text.trace.steps)
    while not text.finished:
        engine.step()
    assert sum(step.nodes for step in text.trace.steps[before:]) > 8
    assert len(asked) < 0.5 * (len(text.trace.steps) - before)
