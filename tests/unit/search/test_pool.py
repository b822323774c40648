"""Searches whose texts the loop writes: each text is what it would be alone, whoever drafts or shares its passes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from covering import FULL
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.sampling import Sampler
from decodery.search.best_of_n import BestOfN
from decodery.search.first_finish import FirstFinish
from decodery.search.self_consistency import SelfConsistency
from decodery.testing import decode, tiny_transformer
from decodery.testing.models import Counted
from methods import BUDGETS, DRAFTERS, KINDS, LOSSY_RULES, SAMPLED, SEARCHES, Even
from sampled import MODEL, OTHER, PROMPT, SETTINGS, Constant, plain, run, told


@pytest.mark.parametrize("name", sorted(SAMPLED))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_width_one_is_plain_decoding(name: str, temperature: float) -> None:
    sampler = Sampler.from_settings(temperature=temperature)
    narrow = {"n": 1, "k": 1} if name == "first-finish" else {"n": 1}
    for seed in range(2 if temperature else 1):
        model = Counted(MODEL)
        (seq,) = run(replace(SEARCHES[name], **narrow), model, seed, sampler=sampler)
        assert seq.generated == plain(1, seed=seed, sampler=sampler)[0] and seq.request.seed == seed
        assert name == "best-of-n" or len(model.rows) == len(seq.generated) == seq.trace.passes + 1


@pytest.mark.parametrize("drafter", KINDS)
def test_any_drafter_leaves_every_text_as_it_is(drafter: str) -> None:
    made = DRAFTERS[drafter](OTHER)
    found = run(BestOfN(Constant(), n=2), drafter=made)
    assert [seq.generated for seq in found] == _alone()
    # Shortest of all, however many tokens a pass gives each.
    drafted = run(RACE, drafter=made, max_new_tokens=40)
    assert told(drafted) == _without_drafts()


RACE = FirstFinish(n=3)


@cache
def _alone() -> list[list[int]]:
    return plain(2)


@cache
def _without_drafts() -> Any:
    return told(run(RACE, max_new_tokens=40))


def test_drafts_speed_up_every_branch() -> None:
    settings = {"max_new_tokens": 40, "eos_ids": (), "sampler": Sampler.from_settings()}
    drafters = None, DRAFTERS["draft-model"](tiny_transformer(3))
    slow, fast = (run(BestOfN(Constant(), n=4), drafter=each, **settings)[0].trace.ledger for each in drafters)
    assert slow.passes["model"] == 41 and fast.passes["model"] < 41 / 2
    # All branches draft in the same passes of the draft model.
    assert fast.passes["draft"] < 41 + fast.passes["model"] and fast.tokens == slow.tokens == 160


def test_rules_and_budgets_of_the_request_hold_for_every_text() -> None:
    drafter = DRAFTERS["draft-model"](OTHER)
    settings: dict[str, Any] = {"drafter": drafter, "draft_length": BUDGETS["fixed"](OTHER)}
    assert [seq.generated for seq in run(BestOfN(Constant(), n=3), **settings)] == plain(3, **settings)
    settings["acceptance_rule"] = LOSSY_RULES["typical"]
    assert [seq.generated for seq in run(BestOfN(Constant(), n=3), **settings)] == plain(3, **settings)


def test_the_prompt_is_read_once_and_passes_are_shared() -> None:
    model = Counted(MODEL)
    run(SelfConsistency(n=4), model, eos_ids=())
    assert model.rows[0] == len(PROMPT) and sum(model.rows) == len(PROMPT) + 3 + 4 * 11
    assert len(model.rows) == 13


@pytest.mark.parametrize("seed", range(6 if FULL else 3))
def test_the_shortest_is_found_and_the_others_stop_at_once(seed: int) -> None:
    texts = plain(5, seed=seed, max_new_tokens=60)
    ended = [text for text in texts if len(text) > 1 and text[-1] in SETTINGS["eos_ids"]]
    shortest = min(ended, key=len)
    (found,) = run(FirstFinish(n=5), seed=seed, max_new_tokens=60)
    assert found.generated == shortest and found.score == -len(shortest)
    ledger = found.trace.ledger
    assert ledger.counts["discarded"] == ledger.tokens - len(shortest)
    # The first text leads the others by the pass that reads the prompt.
    assert ledger.tokens <= 5 * len(shortest) + 1 and sum(map(len, texts)) > ledger.tokens
    both = run(FirstFinish(n=5, k=2, answer="number"), seed=seed, max_new_tokens=60)
    assert {tuple(seq.generated) for seq in both} <= {tuple(text) for text in sorted(ended, key=len)[:2]}


def test_all_that_end_in_the_last_pass_are_in_the_race() -> None:
    # One token each, of which every one is an end: the race is over before anybody goes on.
    ends = {text[1] for text in plain(4, max_new_tokens=2, eos_ids=())}
    found = run(FirstFinish(n=4, k=4), max_new_tokens=2, eos_ids=tuple(ends))
    assert sum(round(4 * (seq.score or 0)) for seq in found) == 4


def test_texts_that_do_not_end_or_say_nothing_do_not_win() -> None:
    (first,) = run(FirstFinish(n=3), eos_ids=())
    assert first.generated == plain(1, eos_ids=())[0] and first.score is None
    ends = plain(4, eos_ids=())[1][:1]
    # A race that takes the first to end, whatever it says, would return a text of its end alone.
    assert min(plain(4, eos_ids=(*ends, 0, 3)), key=len) == ends
    assert len(run(FirstFinish(n=4), eos_ids=(*ends, 0, 3))[0].generated) > 1


@pytest.mark.parametrize("name", sorted(SAMPLED - {"first-finish"}))
def test_the_ledger_counts_every_text(name: str) -> None:
    search = replace(SEARCHES[name], n=5)
    found = run(search)
    ledger, written = found[0].trace.ledger, sum(map(len, plain(5)))
    assert ledger.tokens == written and ledger.counts["discarded"] == written - len(found[0].generated)
    assert found[0].trace.tokens + 1 == len(found[0].generated)
    assert all(seq.trace is found[0].trace for seq in found)


def test_who_shares_the_engine_changes_nothing() -> None:
    searches = [SEARCHES[name] for name in sorted(SAMPLED)]
    alone = [told(run(search, seed=seed)) for seed, search in enumerate(searches)]
    engine = Engine(MODEL)
    texts = [engine.submit(Request(PROMPT[:3], seed=seed, **SETTINGS)) for seed in range(3)]
    jobs = [
        engine.enter(search.find(engine, Request(PROMPT, seed=seed, **SETTINGS)))
        for seed, search in enumerate(searches)
    ]
    engine.run([*texts, *jobs])
    for job, expected in zip(jobs, alone, strict=True):
        for (tokens, score), (known, before) in zip(told(job.result), expected, strict=True):
            assert tokens == known and score == pytest.approx(before, abs=1e-9)
    assert [seq.generated for seq in texts] == [
        decode(MODEL, [PROMPT[:3]], seeds=(seed,), **SETTINGS)[0].generated for seed in range(3)
    ]


def test_a_search_can_be_cancelled_at_any_step() -> None:
    for steps in range(1, 8, 1 if FULL else 2):
        engine = Engine(MODEL)
        job = engine.enter(BestOfN(Even(), n=3).find(engine, Request(PROMPT, **SETTINGS)))
        other = engine.submit(Request(PROMPT, seed=7, **SETTINGS))
        for _ in range(steps):
            engine.step()
        job.cancel()
        engine.run([other])
        assert other.generated == plain(1)[0] and engine.running == 0


@pytest.mark.parametrize("drafter", ["draft-model", "kangaroo"])
def test_a_search_with_drafts_preempted_at_any_step_finds_the_same(drafter: str) -> None:
    search, settings = FirstFinish(n=3, k=2), SETTINGS | {"max_new_tokens": 16}
    expected, made = told(run(search, **settings)), DRAFTERS[drafter](OTHER)
    for steps in itertools.count(1, 1 if FULL else 8):
        engine = Engine(MODEL, prefill_chunk=4)
        request = Request(PROMPT, seed=7, drafter=made, **settings)
        job = engine.enter(search.find(engine, request))
        for _ in range(steps):
            engine.step()
        if job.finished:
            break
        engine.preempt(job)
        engine.run([job])
        assert told(job.result) == expected
    assert steps > 5
