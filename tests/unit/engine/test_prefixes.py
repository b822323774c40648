"""What texts leave for later ones that begin alike: found whole, shared, bounded, and without a trace in any text."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

from covering import FULL
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.models.cache.page_pool import SLOTS
from decodery.sampling import Sampler
from decodery.search.base import Search
from decodery.search.self_consistency import SelfConsistency
from decodery.search.step_beam import StepBeam
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer
from decodery.testing.models import to_int8
from methods import Even

MODEL = tiny_transformer(0)
EXACT = to_int8(MODEL)
SAMPLED = Sampler.from_settings(temperature=0.9)
LONG = [(7 * at) % 60 + 1 for at in range(100)]


def run(engine: Engine, prompt: list[int], **settings: Any) -> Sequence:
    seq = engine.submit(Request(prompt, **{"max_new_tokens": 20, "sampler": SAMPLED} | settings))
    engine.run([seq])
    return seq


def test_a_hit_is_as_long_as_what_texts_have_in_common_and_changes_no_bit() -> None:
    prefixes = PrefixCache(1 << 30)
    engine = Engine(EXACT, prefixes=prefixes, prefill_chunk=23)
    first = run(engine, LONG, logprobs=3)
    again = run(engine, LONG, logprobs=3)
    branch = run(engine, [*LONG[:70], 3, 4, 5], logprobs=3)
    turn = run(engine, [*first.tokens, 9, 9], logprobs=3)
    assert [seq.scheduling.cached for seq in (first, again, branch, turn)] == [0, 99, 70, 119]
    assert sum(step.rows for step in turn.trace.steps if step.prefill) == 3
    for seq in (again, branch, turn):
        alone = run(Engine(EXACT, prefill_chunk=23), seq.tokens[: seq.request.prompt_length], logprobs=3)
        assert seq.tokens == alone.tokens
        assert [(each.logprob, each.top) for each in seq.token_logprobs] == [
            (each.logprob, each.top) for each in alone.token_logprobs
        ]


def test_what_was_read_in_common_is_held_once() -> None:
    prefixes = PrefixCache(1 << 30)
    engine = Engine(MODEL, prefixes=prefixes)
    run(engine, LONG * 4, max_new_tokens=2)
    alone = prefixes.bytes
    for end in range(5):
        run(engine, [*LONG * 4, *[end + 1] * SLOTS], max_new_tokens=2)
    assert len(prefixes) > 1
    assert prefixes.bytes < 2 * alone


def test_other_salts_find_nothing() -> None:
    engine = Engine(MODEL, prefixes=PrefixCache(1 << 30))
    run(engine, LONG, cache_namespace="a")
    assert run(engine, LONG, cache_namespace="b").scheduling.cached == 0
    assert run(engine, LONG, cache_namespace="a").scheduling.cached == 99


def test_what_one_model_has_read_is_no_other_models() -> None:
    prefixes, other = PrefixCache(1 << 30), tiny_transformer(1)
    run(Engine(MODEL, prefixes=prefixes), LONG)
    assert run(Engine(MODEL, prefixes=prefixes), LONG).scheduling.cached == 99
    with pytest.raises(SettingsError, match="another model has read: give each model a PrefixCache of its own"):
        Engine(other, prefixes=prefixes)
    prefixes.clear()
    assert run(Engine(other, prefixes=prefixes), LONG).scheduling.cached == 0


def test_texts_that_need_every_row_of_the_prompt_read_it() -> None:
    engine = Engine(MODEL, prefixes=PrefixCache(1 << 30))
    run(engine, LONG)
    seq = run(engine, LONG, prompt_logprobs=2)
    assert seq.scheduling.cached == 0 and len(seq.prompt_token_logprobs) == len(LONG) - 1


def test_least_recently_used_goes_first_and_bytes_are_bounded() -> None:
    block = MODEL.new_cache().slot_bytes * SLOTS
    prefixes = PrefixCache(20 * block)
    engine = Engine(MODEL, prefixes=prefixes)
    prompts = [[number, *LONG[:79]] for number in range(1, 8)]
    for prompt in prompts[:2]:
        run(engine, prompt, max_new_tokens=4)
    assert run(engine, prompts[0], max_new_tokens=4).scheduling.cached == 79
    for prompt in prompts[2:4]:
        run(engine, prompt, max_new_tokens=4)
        assert prefixes.bytes <= prefixes.most
    # Six blocks each: three texts fit, and the second was not used again.
    assert [run(engine, prompts[number], max_new_tokens=4).scheduling.cached for number in (0, 1)] == [79, 0]
    while prefixes.evict():
        pass
    assert prefixes.bytes == 0 and not prefixes.caches


def test_what_is_kept_gives_way_to_texts_in_progress() -> None:
    one = MODEL.new_cache().slot_bytes * 256
    prefixes = PrefixCache(1 << 30)
    engine = Engine(MODEL, prefixes=prefixes, limits=Limits(cache_bytes=2 * one))
    for number in range(1, 9):
        run(engine, [number, *LONG])
        assert engine.held_bytes <= 2 * one
    texts = [engine.submit(Request([number, *LONG], max_new_tokens=20)) for number in (20, 21)]
    engine.step()
    assert engine.running == 2
    engine.run(texts)


def holders(prefixes: PrefixCache, texts: list[Sequence]) -> None:
    """Every page is held by exactly those who say they hold it."""
    caches = [each.cache for each in prefixes._entries] + [text.cache for text in texts]
    counted: dict[int, Any] = {}
    for cache in caches:
        pool = cache.pages.pool
        counted.setdefault(pool, np.zeros(pool.most, dtype=np.int32))[cache.pages.held] += 1
    for pool, held in counted.items():
        assert (held[held > 0] == pool.holders[held > 0]).all()


@pytest.mark.parametrize("seed", range(6 if FULL else 3))
def test_random_traffic_leaves_every_text_as_it_is_alone(seed: int) -> None:
    """Prompts that begin alike, arrivals, cancellations, preemptions and too little memory, with an audit of blocks."""
    chance = random.Random(seed)
    slot = EXACT.new_cache().slot_bytes
    prefixes = PrefixCache(chance.choice([0, 700, 4000]) * slot)
    limits = Limits(rows=chance.choice([7, 40, 300]), texts=6, cache_bytes=chance.choice([None, 900 * slot]))
    engine = Engine(EXACT, prefixes=prefixes, limits=limits, prefill_chunk=chance.choice([5, 64]))
    texts: list[Sequence] = []
    for _ in range(120 if FULL else 50):
        if chance.random() < 0.25 and len(texts) < 24:
            prompt = LONG[: chance.choice([3, 20, 64, 90])] + [
                chance.randint(1, 3) for _ in range(chance.randint(1, 20))
            ]
            if texts and chance.random() < 0.3:
                prompt = [*chance.choice(texts).tokens, 5]
            settings = {"seed": len(texts), "max_new_tokens": chance.randint(1, 30)}
            texts.append(engine.submit(Request(prompt[:300], sampler=SAMPLED, **settings)))
        going = [text for text in texts if not text.finished]
        if going and chance.random() < 0.06:
            chance.choice(going).cancel()
        if going and chance.random() < 0.1:
            engine.preempt(chance.choice(going))
        engine.step()
        holders(prefixes, texts)
    engine.run([text for text in texts if not text.finished])
    assert sum(text.scheduling.cached for text in texts) > 0 or prefixes.most == 0
    for text in texts:
        (alone,) = decode(
            EXACT,
            [text.tokens[: text.request.prompt_length]],
            sampler=SAMPLED,
            seeds=(text.request.seed,),
            max_new_tokens=text.request.max_new_tokens,
        )
        assert text.generated == alone.generated[: len(text.generated)]
        assert text.finish_reason == "cancelled" or text.tokens == alone.tokens


def test_logprobs_of_the_prompt_are_those_of_reading_it_at_once_whatever_interrupts() -> None:
    from decodery.models.batch import Batch, Segment

    logits = MODEL.forward(Batch([Segment.chunk(LONG, MODEL.new_cache())])).logits.log_softmax(dim=-1)
    expected = [float(row[token]) for row, token in zip(logits, LONG[1:], strict=False)]
    for chunk in (1, 7, 512):
        engine = Engine(MODEL, prefill_chunk=chunk)
        seq = engine.submit(Request(LONG, prompt_logprobs=2, max_new_tokens=5))
        for _ in range(4):
            engine.step()
            engine.preempt(seq)
        clone = engine.submit(Request(LONG, prompt_logprobs=2, max_new_tokens=5), like=seq)
        engine.run([seq, clone])
        for text in (seq, clone):
            assert [each.token for each in text.prompt_token_logprobs] == LONG[1:]
            assert max(abs(a.logprob - b) for a, b in zip(text.prompt_token_logprobs, expected, strict=True)) < 1e-5
            assert all(each.top[0][1] >= each.logprob and len(each.top) == 2 for each in text.prompt_token_logprobs)


def test_the_trace_keeps_drafts_that_are_asked_for() -> None:
    from decodery.speculative.drafters.prompt_lookup import PromptLookup

    prompt = [1, 2, 3, 4, 5] * 6
    (plain,) = decode(MODEL, [prompt], drafter=PromptLookup(length=6), max_new_tokens=30)
    engine = Engine(MODEL)
    seq = run(
        engine,
        prompt,
        drafter=PromptLookup(length=6),
        max_new_tokens=30,
        sampler=Sampler.from_settings(),
        return_draft_trees=True,
    )
    assert seq.tokens == plain.tokens and all(step.tree is None for step in plain.trace.steps)
    told = [step.tree for step in seq.trace.steps if step.tree is not None]
    assert [token for tree in told for token in tree.emitted] == seq.generated
    for step, tree in zip((step for step in seq.trace.steps if step.emitted), told, strict=True):
        assert len(tree.tokens) == step.nodes + 1 or step.prefill
        assert [tree.tokens[node] for node in tree.path] == tree.emitted[: len(tree.path)]
        assert len(tree.path) == step.accepted


@pytest.mark.parametrize("search", [SelfConsistency(n=3, answer="whole"), StepBeam(Even(), (9,), n=4, m=2)])
def test_searches_begin_with_what_was_read(search: Search) -> None:
    prompt = [*LONG[:70], 3, 4, 5]
    request = Request(prompt, 12, SAMPLED, seed=3)
    alone = search.run(Engine(EXACT), request)
    engine = Engine(EXACT, prefixes=PrefixCache(1 << 30))
    run(engine, LONG)
    found = search.run(engine, request)
    assert [seq.generated for seq in found] == [seq.generated for seq in alone]
    # One of the branches reads what is missing, for all of them.
    rows = [sum(step.rows for step in seqs[0].trace.steps if step.prefill) for seqs in (alone, found)]
    assert rows[0] - rows[1] == 70


def test_engines_with_different_limits_share_what_was_read() -> None:
    """A text that goes on with what another engine has read takes pages of that engine's memory."""
    size, prefixes = 4000 * EXACT.new_cache().slot_bytes, PrefixCache(1 << 30)
    first, second = (Engine(EXACT, limits=Limits(cache_bytes=most), prefixes=prefixes) for most in (size, 2 * size))
    start, others = LONG[:40], ([5] * 40, LONG[60:])
    run(first, start, max_new_tokens=2)
    seqs = [second.submit(Request(prompt, max_new_tokens=60)) for prompt in (others[0], [*start, 3], others[1])]
    seqs += [first.submit(Request([number] * 41, max_new_tokens=60)) for number in (2, 4, 6)]
    pools = set()
    while any(not seq.finished for seq in seqs):
        pools.add(len({id(run.task.cache.pages.pool) for run in second._arrays.runs}))
        first.step()
        second.step()
    assert 2 in pools, "texts in two pools were never in one batch"
    for seq in seqs:
        (alone,) = decode(EXACT, [seq.tokens[: seq.request.prompt_length]], max_new_tokens=60)
        assert seq.tokens == alone.tokens and seq.error is None
    del seq, seqs
    prefixes.clear()
    gc.collect()
    for engine in (first, second):
        limit = engine._schedule.memory.limit
        assert limit is not None
        assert limit.used == 0 and all((pool.holders >= 0).all() for pool in limit.pools.values())
