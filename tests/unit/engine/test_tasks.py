"""Tasks: passes are shared by whoever waits for them, and tasks can be paused and preempted."""

from __future__ import annotations

import gc
import pickle
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from covering import FULL
from decodery.core.errors import OutOfMemory, SettingsError
from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits
from decodery.kv_cache.h2o import H2O
from decodery.llm.llm import LLM, Output
from decodery.models.batch import Segment
from decodery.models.cache.page_pool import SLOTS
from decodery.models.cache.pages import resident
from decodery.sampling import Sampler
from decodery.search import Beam
from decodery.speculative.acceptance.cntp import CNTP
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.acceptance.recursive_rejection import RecursiveRejection
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.acceptance.typical import Typical
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.forward_request import ForwardCoroutine, ForwardResult, gather, run_sync, score
from decodery.step.sequence import Sequence
from decodery.testing import Garbage, decode, tiny_transformer
from decodery.testing.models import Counted, to_int8
from methods import ADAPTIVE, DRAFTERS, KINDS, fits
from tiny_models import tiny_loaded

MODEL, SMALL = tiny_transformer(0), tiny_transformer(0, num_layers=1)
EXACT = to_int8(MODEL)
"""Whose rows are the same to the bit whatever shares a pass, so that what is read again is what was read."""
PROMPTS = [[1 + number, 2, 3, 5 + number % 7] for number in range(16)]
SAMPLED = Sampler.from_settings(temperature=0.8, repetition_penalty=1.2, dry=0.8)


@cache
def plain(n: int, first: int, last: int) -> list[list[int]]:
    return [run.generated for run in decode(MODEL, PROMPTS[first:last], max_new_tokens=n)]


def assert_plain(texts: list[Sequence], n: int, first: int = 0) -> None:
    """Greedy texts of the prompts from number `first` on are what they are alone."""
    assert [text.generated for text in texts] == plain(n, first, first + len(texts))


# Passes are shared.


@pytest.mark.parametrize("growth", [None, "eagle-2(nodes=12,width=3,depth=4)"])
def test_sixteen_texts_cost_the_draft_passes_of_one(growth: str | None) -> None:
    passes = []
    for prompts in (PROMPTS[:1], PROMPTS):
        target, draft = Counted(MODEL), Counted(SMALL)
        runs = decode(target, prompts, drafter=DraftModel(draft, tree_policy=growth), max_new_tokens=12)
        passes.append((len(draft.rows), len(target.rows)))
        ledgers = [run.trace.ledger for run in runs]
        assert max(ledger.passes["draft"] for ledger in ledgers) <= len(draft.rows)
        assert sum(ledger.rows["draft"] for ledger in ledgers) == sum(draft.rows)
        assert all(ledger.seconds["draft"] > 0 for ledger in ledgers)
    (drafts, steps), (shared, together_) = passes
    # Texts that need more steps than the first cost their own share; one by one it would be sixteen times as many.
    assert shared <= drafts * together_ / steps * 1.5


def test_a_node_of_a_draft_tree_is_read_once() -> None:
    draft = Counted(SMALL)
    (run,) = decode(MODEL, PROMPTS[:1], drafter=DraftModel(draft, tree_policy="eagle-2(nodes=12,width=3,depth=4)"))
    steps = run.trace.decoding
    # Of each step at most the accepted tokens' successors and three nodes in each of three further levels.
    assert sum(draft.rows) <= len(PROMPTS[0]) + sum(step.emitted for step in steps) + len(steps) * 9 + 1


def test_searches_and_texts_share_their_passes() -> None:
    model = Counted(MODEL)
    engine = Engine(model)
    texts = [engine.submit(Request(prompt, max_new_tokens=20)) for prompt in PROMPTS[:3]]
    searches = [Beam(width=3), Beam(width=2)]
    jobs = [
        engine.enter(search.find(engine, Request(prompt, max_new_tokens=20)))
        for search, prompt in zip(searches, PROMPTS[3:], strict=False)
    ]
    engine.run([*texts, *jobs])
    assert len(model.rows) == 20
    assert_plain(texts, 20)
    for search, job, prompt in zip(searches, jobs, PROMPTS[3:], strict=False):
        alone = search.run(Engine(MODEL), Request(prompt, max_new_tokens=20))
        assert [seq.tokens for seq in job.result] == [seq.tokens for seq in alone]


def test_trials_of_a_rule_that_looks_ahead_are_read_once() -> None:
    rule = CNTP(least=10, most=10, length=32)
    (run,) = decode(
        MODEL, PROMPTS[:1], acceptance_rule=rule, sampler=Sampler.from_settings(temperature=1.0), max_new_tokens=60
    )
    decisions = sum(1 for step in run.trace.steps if step.emitted)
    assert decisions >= 2
    # Ten trials of up to 32 tokens, the last of which nobody has to read.
    assert run.trace.ledger.counts["extra_rows"] <= decisions * 10 * 31


def test_what_waits_together_is_answered_together() -> None:
    model = Counted(MODEL)

    def read(tokens: list[int]) -> ForwardCoroutine[ForwardResult]:
        cache = model.new_cache()
        for token in tokens[:-1]:
            yield from score(model, Segment.chunk([token], cache))
            cache.keep([0])
        return (yield from score(model, Segment.chunk(tokens[-1:], cache)))

    found = run_sync(gather([read([1, 2, 3]), read([4]), read([5, 6])]))
    assert model.rows == [3, 2, 1]
    for scored, tokens in zip(found, ([1, 2, 3], [4], [5, 6]), strict=True):
        assert (scored.logits - run_sync(read(tokens)).logits).abs().max() < 1e-12


# Tasks can be held up.


LOSSY = [None, Rejection(), Typical()]
QUICK = DraftModel(to_int8(SMALL), length=3)


@pytest.mark.parametrize("rule", LOSSY, ids=["coupled", "rejection", "typical"])
@pytest.mark.parametrize("hold", ["pause", "preempt"])
def test_what_comes_after_a_pause_is_what_would_have_come(rule: Any, hold: str) -> None:
    def text(step: int | None) -> list[int]:
        """The text that is held up after so many steps, None: never."""
        engine = Engine(EXACT, prefill_chunk=3)
        settings: dict[str, Any] = {"sampler": SAMPLED, "max_new_tokens": 12, "seed": 3}
        if rule is not None:
            settings["acceptance_rule"] = rule
        seq = engine.submit(Request(PROMPTS[0], drafter=QUICK, **settings))
        other = engine.submit(Request(PROMPTS[1], **settings | {"acceptance_rule": Rejection()}))
        for _ in range(step or 0):
            engine.step()
        if step is not None and hold == "preempt":
            engine.preempt(seq)
        elif step is not None:
            seq.paused = True
            before = list(seq.tokens)
            engine.run([other])
            assert seq.tokens == before
            with pytest.raises(ValueError, match="resume"):
                engine.run([seq])
            seq.paused = False
        engine.run([seq, other])
        return seq.tokens

    expected = text(None)
    for step in (0, 2, 5):
        assert text(step) == expected


SCHEDULED = [name for name in KINDS if name not in ADAPTIVE]


FORKED = [
    *((name, Coupled()) for name in SCHEDULED),
    # What a rule draws hangs on where drafts come from and not on who made them: one of each origin, and a tree.
    *((name, Rejection()) for name in ("draft-model", "prompt-lookup", "eagle-3")),
    ("ngram", RecursiveRejection()),
]
"""Every drafter has a state of its own, which a fork takes along; every rule sees all states alike."""


def forked(engine: Engine, seq: Sequence) -> Sequence:
    """A fork where the next step has ended: drafts may take passes of the target itself."""
    while True:
        try:
            return engine.fork(seq)
        except ValueError:
            engine.step()


@pytest.mark.parametrize(("name", "rule"), FORKED, ids=[f"{name}-{type(rule).__name__}" for name, rule in FORKED])
def test_forks_go_on_as_the_text_would(name: str, rule: AcceptanceRule) -> None:
    drafter = DRAFTERS[name](SMALL)
    if hasattr(drafter, "scope"):
        # In a store of the process a text and its forks would learn from each other.
        drafter = replace(drafter, scope="request")
    assert fits(drafter, rule)
    engine = Engine(EXACT, prefill_chunk=3)
    settings = {"drafter": drafter, "acceptance_rule": rule, "sampler": SAMPLED, "max_new_tokens": 16 if FULL else 10}
    seq = engine.submit(Request([5, 6, 7, 5, 6, 7, 5, 6], seed=1, **settings))
    forks = []
    # While it reads, where it has read, and as it writes.
    for step in range(7 if FULL else 6):
        engine.step()
        if FULL or step in (0, 3, 5):
            forks.append(forked(engine, seq))
    engine.preempt(forks[0])
    engine.preempt(forks[-2])
    engine.run([seq, *forks])
    drafted = [step.nodes for step in seq.trace.decoding]
    for fork in forks:
        assert fork.tokens == seq.tokens and fork.finish_reason == seq.finish_reason
        assert [step.nodes for step in fork.trace.decoding if step.emitted] == drafted
    other = Request([5, 6, 7, 5, 6, 7, 5, 6], seed=2, **settings)
    parted = engine.submit(other)
    engine.step()
    clone = engine.fork(parted)
    clone.rebind(seed=3)
    engine.run([parted, clone])
    assert (
        parted.generated
        == decode(EXACT, [other.prompt], seeds=(2,), prefill_chunk=3, **settings)[0].generated
        != clone.generated
    )


def test_a_preempted_text_gives_its_memory_back_and_shows_its_drafter_nothing_twice() -> None:
    shown: list[int] = []

    @dataclass(frozen=True)
    class Watching(Garbage):
        requirements = Requirements(prompt=True)

        def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
            shown.extend(range(seen.start, seen.start + (len(seen.path) + 1)))

    engine = Engine(MODEL, prefill_chunk=2)
    seq = engine.submit(Request(list(range(1, 10)), drafter=Watching(), max_new_tokens=12))
    for _ in range(8):
        engine.step()
        engine.preempt(seq)
    engine.run([seq])
    assert shown == sorted(set(shown)) and len(shown) >= len(seq.tokens) - 1
    assert seq.generated == decode(MODEL, [list(range(1, 10))], max_new_tokens=12)[0].generated


def test_a_cancelled_search_ends_and_others_go_on() -> None:
    engine = Engine(MODEL)
    job = engine.enter(Beam(width=3).find(engine, Request(PROMPTS[0], max_new_tokens=20)))
    seq = engine.submit(Request(PROMPTS[1], max_new_tokens=20))
    for _ in range(3):
        engine.step()
    job.cancel()
    engine.run([seq, job])
    assert job.finished and job.result is None
    assert seq.generated == decode(MODEL, PROMPTS[1:2], max_new_tokens=20)[0].generated


# Bounds.


def test_prompts_that_arrive_together_are_read_within_the_rows_of_a_pass() -> None:
    long = [[(7 * number + at) % 60 + 1 for at in range(90)] for number in range(12)]
    model = Counted(MODEL)
    engine = Engine(model, prefill_chunk=64, limits=Limits(rows=100))
    writer = engine.submit(Request(PROMPTS[0], drafter=Garbage(nodes=60), max_new_tokens=30))
    engine.step()
    texts = [engine.submit(Request(prompt, max_new_tokens=8)) for prompt in long]
    written = []
    for _ in range(8):
        before = writer.position
        engine.step()
        written.append(writer.position - before)
    engine.run([writer, *texts])
    assert max(model.rows) <= 100
    # Who writes goes on in every pass.
    assert min(written) >= 1
    expected = decode(MODEL, long, max_new_tokens=8, together=False)
    assert [text.generated for text in texts] == [run.generated for run in expected]


def test_more_texts_than_rows_take_turns() -> None:
    engine = Engine(MODEL, limits=Limits(rows=5))
    texts = [engine.submit(Request(prompt, max_new_tokens=10, drafter=Garbage())) for prompt in PROMPTS]
    positions = []
    while any(not text.finished for text in texts):
        engine.step()
        positions.append([text.position for text in texts])
    assert [text.generated for text in texts] == [run.generated for run in decode(MODEL, PROMPTS, max_new_tokens=10)]
    # Nobody is left after for good: once all have begun, they stay within a few tokens of each other.
    begun = [row for row in positions if min(row) > 0 and max(row) < 10]
    assert all(max(row) - min(row) <= 4 for row in begun)


def test_texts_wait_for_memory_and_give_it_back() -> None:
    one = MODEL.new_cache().slot_bytes * 256
    bound = one * 3
    engine = Engine(MODEL, limits=Limits(cache_bytes=bound))
    texts = [engine.submit(Request(prompt, max_new_tokens=30)) for prompt in PROMPTS[:8]]
    most = 0
    while any(not text.finished for text in texts):
        engine.step()
        most = max(most, resident(text.cache.pages for text in texts if not text.finished))
    assert most <= bound
    assert_plain(texts, 30)
    with pytest.raises(OutOfMemory, match="cache_bytes"):
        Engine(MODEL, limits=Limits(cache_bytes=10)).submit(Request(PROMPTS[0]))
    with pytest.raises(SettingsError, match="at least one row"):
        Limits(rows=0)


# What is left of a text.


def test_outputs_are_plain_values_and_keep_a_cache_only_when_asked(smollm2_int8: LLM) -> None:
    first = smollm2_int8.generate("Name a bird.", max_new_tokens=8, drafter=None)
    assert isinstance(first, Output) and first.kept is None
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(SettingsError, match="return_cache"):
        smollm2_int8.generate("Name a bird.", reuse=first)
    kept = smollm2_int8.generate("Name a bird.", max_new_tokens=8, drafter=None, return_cache=True)
    assert kept.tokens == first.tokens and kept.kept is not None and pickle.loads(pickle.dumps(kept)).kept is None
    again = smollm2_int8.generate("Name a bird.", max_new_tokens=8, drafter=None, reuse=kept)
    assert again.tokens == first.tokens and again.trace.steps[0].rows == 1


def test_a_text_goes_on_from_no_other_models_keys_and_values() -> None:
    # Another checkpoint of the same shape, another precision, and the same weights once more.
    others = tiny_transformer(1), EXACT, tiny_transformer(0)
    (begun,) = decode(MODEL, PROMPTS[:1], max_new_tokens=6)
    lm, owned = LLM(tiny_loaded()), LLM(tiny_loaded())
    output = lm.generate("The cache", max_new_tokens=6, return_cache=True)
    assert output.kept is not None and output.kept.model() is lm.model
    for model in others:
        for reuse in (begun, output.kept):
            with pytest.raises(SettingsError, match=r"what another model has read .* give an output of this model"):
                Engine(model).submit(Request(PROMPTS[0], reuse=reuse))
    with pytest.raises(SettingsError, match="what another model has read"):
        owned.generate("The cache", reuse=output)
    # One policy more or less is the same model.
    assert Engine(MODEL).submit(Request([*begun.tokens, 3], cache_policy=H2O(0.5), reuse=begun)).cache is not None
    assert Engine(MODEL).submit(Request([*begun.tokens, 3], reuse=begun)).cache.next_position == len(begun.tokens) - 1
    del lm.model
    gc.collect()
    assert output.kept.model() is None
    with pytest.raises(SettingsError, match="what another model has read"):
        owned.generate("The cache", reuse=output)


def test_a_prompt_is_shared_by_texts_of_one_model_alone() -> None:
    first = Engine(MODEL).submit(Request(PROMPTS[0]))
    with pytest.raises(SettingsError, match="their sources, models"):
        Engine(tiny_transformer(1)).submit(Request(PROMPTS[0]), like=first)


@pytest.mark.parametrize("drafter", [None, Garbage()])
def test_a_text_holds_what_it_needs_and_no_more(drafter: Drafter | None) -> None:
    model = tiny_transformer(0, max_positions=8192)
    slot = model.new_cache().slot_bytes
    engine = Engine(model, prefill_chunk=37)
    prompt = [token % 64 for token in range(600)]
    text = engine.submit(Request(prompt, max_new_tokens=150, drafter=drafter, max_draft_tokens=5))
    held = []
    while not text.finished:
        engine.step()
        held.append(resident([text.cache.pages]))
    # The prompt's memory comes at once; then a page is added wherever one begins.
    assert held[0] == -(-len(prompt) // SLOTS) * SLOTS * slot and max(held) <= (600 + 150 + 5 + SLOTS) * slot
    assert all(after <= before + SLOTS * slot for before, after in pairwise(held))


def test_several_texts_never_hold_more_than_is_allowed() -> None:
    model = tiny_transformer(0, max_positions=8192)
    bound = 1200 * model.new_cache().slot_bytes
    engine = Engine(model, limits=Limits(cache_bytes=bound))
    texts = [
        engine.submit(
            Request([(3 * token + number) % 64 for token in range(500)], max_new_tokens=90, drafter=Garbage())
        )
        for number in range(3)
    ]
    most = 0
    while any(not text.finished for text in texts):
        engine.step()
        most = max(most, resident(text.cache.pages for text in texts if not text.finished))
    assert 2 * 500 * model.new_cache().slot_bytes < most <= bound and engine.preemptions
    assert all(len(text.generated) == 90 for text in texts)
