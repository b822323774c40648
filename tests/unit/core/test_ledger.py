"""What a request spent is what was really run: the models' own forward calls are counted beside the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from decodery.core.ledger import Ledger, charged, count
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.logits_sources.guidance import Guidance
from decodery.models.batch import Batch, Segment
from decodery.models.cache.pages import resident
from decodery.models.loaders.store import Progress, silent
from decodery.sampling import Sampler
from decodery.search.base import Branches, Search, choose
from decodery.search.beam import Beam
from decodery.speculative.drafters.dflash import DFlash
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.dspark import DSpark
from decodery.speculative.drafters.eagle import EAGLE
from decodery.speculative.drafters.kangaroo import Kangaroo
from decodery.speculative.drafters.mtp import MTP
from decodery.speculative.drafters.own_layers import OwnLayers
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer
from decodery.testing.models import Counted
from methods import DRAFTERS, DRAWING, KINDS, SEARCHES, TWO_MODELS

MODEL, SMALL = tiny_transformer(0), tiny_transformer(0, num_layers=1)
OWN_LAYERS = (OwnLayers, Kangaroo)
HEADS = (DFlash, DSpark, EAGLE, MTP)
PROMPTS = [[1 + number, 2, 3, 5 + number % 7] for number in range(16)]


def assert_spent(ledger: Ledger, **models: Counted) -> None:
    """Passes and rows are those that were run, of all models that ran."""
    ran = {name: model for name, model in models.items() if model.rows}
    assert ledger.passes == {name: len(model.rows) for name, model in ran.items()}
    assert ledger.rows == {name: sum(model.rows) for name, model in ran.items()}
    assert set(ledger.seconds) == set(ran) and min(ledger.seconds.values()) > 0


@pytest.mark.parametrize("name", KINDS)
def test_a_text_spent_what_was_run(name: str) -> None:
    target, draft = Counted(MODEL), Counted(SMALL)
    (seq,) = decode(target, [[5, 6, 7, 5, 6, 7, 5, 6]], drafter=DRAFTERS[name](draft), max_new_tokens=24)
    ledger = seq.trace.ledger
    if isinstance(seq.request.drafter, OWN_LAYERS):
        # Some of the target's layers draft, and count as what they do.
        assert sum(ledger.passes.values()) == len(target.rows) and not draft.rows
        assert sum(ledger.rows.values()) == sum(target.rows) and 0 < ledger.rows["draft"] < sum(target.rows)
    elif isinstance(seq.request.drafter, HEADS):
        # Their heads are no models, and their passes are entered as what they do.
        assert ledger.passes["model"] == len(target.rows) and ledger.rows["model"] == sum(target.rows)
        assert ledger.passes["draft"] > 0 and not draft.rows
    else:
        assert_spent(ledger, model=target, draft=draft)
    assert ledger.tokens == len(seq.generated) == 24 and ledger.scorer_calls == 0
    # What drafts waits for the target and the target for what drafts; only what is asked together is no deeper.
    drafted = ledger.passes.get("draft", 0)
    assert len(target.rows) <= ledger.depth <= len(target.rows) + drafted


def test_depth_is_how_many_passes_followed_each_other() -> None:
    (plain,) = decode(MODEL, PROMPTS[:1], max_new_tokens=9)
    (guided,) = decode(MODEL, PROMPTS[:1], logits_source=Guidance(1.5, (9, 8, 7)), max_new_tokens=9)
    assert plain.trace.ledger.depth == guided.trace.ledger.depth == 9
    target, draft = Counted(MODEL), Counted(SMALL)
    (chain,) = decode(target, PROMPTS[:1], drafter=DraftModel(draft, length=3), max_new_tokens=9)
    assert chain.trace.ledger.depth == len(target.rows) + len(draft.rows)


@pytest.mark.parametrize("drafted", [False, True])
def test_rows_of_texts_that_share_passes_add_up_to_those_run(drafted: bool) -> None:
    target, draft = Counted(MODEL), Counted(SMALL)
    texts = decode(target, PROMPTS, drafter=DraftModel(draft, length=3) if drafted else None, max_new_tokens=20)
    ledgers = [text.trace.ledger for text in texts]
    for name, model in (("model", target), ("draft", draft)):
        assert sum(ledger.rows.get(name, 0) for ledger in ledgers) == sum(model.rows)
        passes = [ledger.passes.get(name, 0) for ledger in ledgers]
        # Each took part in as many; shared ones count in all who share them.
        assert max(passes) <= len(model.rows) and (not drafted or sum(passes) > 4 * len(model.rows))
    assert [ledger.passes["model"] for ledger in ledgers] == [len(text.trace.steps) for text in texts]


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_a_search_spent_what_was_run_for_all_its_branches(name: str) -> None:
    model = Counted(MODEL)
    sampler = Sampler.from_settings(temperature=1.0 if name in DRAWING else 0.0)
    prompt = [7, 3, 9, 9, 2, 11, 14, 5, 7, 3]
    request = Request(prompt, max_new_tokens=16, sampler=sampler, eos_ids=(0, 1))
    search, second = SEARCHES[name], Counted(SMALL)
    if name in TWO_MODELS:
        search = replace(search, model=second)  # type: ignore[call-arg]
    found = search.run(Engine(model), request)
    ledger = found[0].trace.ledger
    assert all(seq.trace.ledger is ledger for seq in found)
    assert_spent(ledger, model=model, draft=second)
    assert ledger.depth == len(model.rows) + len(second.rows)
    # Of several results the longest is among what was written; branches that were left are, too.
    assert ledger.tokens >= max(len(seq.generated) for seq in found)


def test_tokens_of_branches_that_were_left_are_spent() -> None:
    (best, *_) = Beam(width=3).run(Engine(MODEL), Request(PROMPTS[0], max_new_tokens=10))
    assert best.trace.ledger.tokens == 3 * 10


@dataclass(frozen=True)
class Sneaky(Search):
    """Wrong on purpose: reads the prompt after the engine's back."""

    def find(self, engine: Engine, request: Request, progress: Progress = silent) -> ForwardCoroutine[list[Sequence]]:
        branches = Branches(engine, request, self)
        root = branches.root
        branches.model.forward(Batch([Segment.chunk(root.tokens[:-1], root.cache)]))
        root.cache.keep(range(len(root.tokens) - 1))
        logits = yield from branches.score([root])
        choose(root, int(logits[0].argmax()), logits[0])
        return branches.finish([root])


def test_what_runs_behind_the_engines_back_shows() -> None:
    model = Counted(MODEL)
    (seq,) = Sneaky().run(Engine(model), Request(PROMPTS[0], max_new_tokens=1))
    with pytest.raises(AssertionError):
        assert_spent(seq.trace.ledger, model=model)


def test_what_is_read_again_is_spent_again() -> None:
    model = Counted(MODEL)
    engine = Engine(model)
    seq = engine.submit(Request(PROMPTS[0], max_new_tokens=8))
    for _ in range(5):
        engine.step()
    engine.preempt(seq)
    engine.run([seq])
    assert_spent(seq.trace.ledger, model=model)
    assert sum(model.rows) == 4 + 7 + 4 + 4 and seq.trace.ledger.tokens == 8


def test_bytes_are_the_most_that_was_held() -> None:
    drafter = DraftModel(SMALL, length=3)
    (plain,) = decode(MODEL, PROMPTS[:1], max_new_tokens=9)
    (drafted,) = decode(MODEL, PROMPTS[:1], drafter=drafter, max_new_tokens=9)
    assert plain.trace.ledger.bytes == plain.cache.bytes
    assert drafted.trace.ledger.bytes == plain.cache.bytes + plain.cache.bytes // 2
    engine, most = Engine(MODEL), 0
    job = engine.enter(Beam(width=8).find(engine, Request(PROMPTS[0] * 60, max_new_tokens=12)))
    while not job.finished:
        engine.step()
        (run,) = engine._schedule.runs or [None]
        most = max(most, 0 if run is None else resident(cache.pages for cache in run.caches))
    assert job.result is not None
    ledger, one = job.result[0].trace.ledger, job.result[0].cache
    # Branches share their prompt: eight of them hold less than three texts would.
    assert most <= ledger.bytes < 3 * one.slot_bytes * 256
    assert one.slot_bytes * len(job.result[0].tokens) < ledger.bytes


def test_a_fork_goes_on_with_an_account_of_its_own() -> None:
    engine = Engine(MODEL)
    seq = engine.submit(Request(PROMPTS[0], max_new_tokens=8))
    for _ in range(3):
        engine.step()
    clone = engine.fork(seq)
    engine.run([seq, clone])
    ours, theirs = seq.trace.ledger, clone.trace.ledger
    assert ours is not theirs and ours.passes == theirs.passes == {"model": 8} and ours.tokens == theirs.tokens == 8


def test_what_is_counted_belongs_to_the_turn_it_is_counted_in() -> None:
    count("nobody's")
    assert charged().counts == {}

    def counting(name: str) -> ForwardCoroutine[Ledger]:
        for _ in range(3):
            count(name)
            yield from score(MODEL, Segment.chunk([1], MODEL.new_cache()))
        return charged()

    engine = Engine(MODEL)
    first, second = engine.enter(counting("a")), engine.enter(counting("b"))
    engine.run([first, second])
    assert first.result is not None and first.result.counts == {"a": 3}
    assert second.result is not None and second.result.counts == {"b": 3}
    assert first.result.summary()["counts"] == {"a": 3}
