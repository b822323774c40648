"""Logits of a pass are in the account: pages leave room for them, and drafts are trimmed to what is left."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decodery.core.requirements import Requirements
from decodery.engine.engine import Engine
from decodery.engine.memory import MemoryBudget
from decodery.engine.prefixes import PrefixCache
from decodery.engine.request import Request
from decodery.engine.schedule import Limits, _without_drafts
from decodery.models.batch import Batch, Scores
from decodery.models.cache.memory_limit import MemoryLimit
from decodery.search.beam import Beam
from decodery.testing import Garbage, decode, tiny_transformer, to_int8
from decodery.testing.models import Counted

MODEL = to_int8(tiny_transformer(0, num_layers=1, vocab_size=512, max_positions=256))
SLOT = MODEL.new_cache().slot_bytes
DRAFTERS = [None, Garbage(nodes=2), Garbage(nodes=8)]


class Shown(Garbage):
    """A drafter that learns from the rows of the prompt."""

    requirements = Requirements(prompt=True)


class Weighed(Counted):
    """A model that records what pages and the logits of each pass take together."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.limit: MemoryLimit | None = None
        self.most = 0

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        scores = super().forward(batch, **settings)
        assert self.limit is not None
        if len(batch.segments) > 1:
            self.most = max(self.most, self.limit.used + scores.logits.nbytes)
        return scores


def most_taken(seed: int) -> float:
    """What pages and logits of random texts and searches take at most, in parts of a limit that holds a few of them."""
    model, chance, tasks = Weighed(), random.Random(seed), list[Any]()
    engine = Engine(model, limits=Limits(cache_bytes=500 * SLOT), prefill_chunk=48)
    model.limit = engine._schedule.memory.limit
    for step in range(800):
        if step < 60 and chance.random() < 0.5:
            prompt = [chance.randrange(512) for _ in range(chance.choice([3, 20, 60, 110]))]
            settings = {"drafter": chance.choice(DRAFTERS), "max_draft_tokens": 8, "seed": step}
            length = chance.randrange(2, 60)
            if chance.random() < 0.1:
                tasks.append(engine.enter(Beam(width=3).find(engine, Request(prompt, max_new_tokens=8))))
            else:
                tasks.append(engine.submit(Request(prompt, max_new_tokens=length, **settings)))
        engine.step()
        if step >= 60 and all(task.finished for task in tasks):
            break
    assert all(task.finished and task.error is None for task in tasks) and engine.preemptions
    for text in tasks:
        if not hasattr(text, "coroutine"):
            (plain,) = decode(MODEL, [text.tokens[: text.request.prompt_length]], max_new_tokens=len(text.generated))
            assert text.generated == plain.generated
    return model.most / (500 * SLOT)


@pytest.mark.parametrize("seed", range(3))
def test_pages_and_logits_stay_within_the_limit(seed: int) -> None:
    assert 0.8 < most_taken(seed) <= 1


def test_logits_that_do_not_count_would_exceed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBudget, "_logits", lambda budget, runs: 0)
    monkeypatch.setattr(MemoryBudget, "draft_nodes", lambda budget, nodes, *others: nodes)
    assert max(most_taken(seed) for seed in range(2)) > 1.1


def drafted(kept: int) -> list[int]:
    """Nodes that each of some rounds of texts draft beside at most so many bytes that are kept for later ones."""
    limit, found = 800 * SLOT, list[int]()
    engine = Engine(MODEL, limits=Limits(cache_bytes=limit), prefixes=PrefixCache(kept))
    for first in range(6):
        prompts = [[(first * 7 + number + place % 9) % 512 for place in range(60)] for number in range(4)]
        texts = [engine.submit(Request(prompt, max_new_tokens=30, drafter=DRAFTERS[2])) for prompt in prompts]
        engine.run(texts)
        found.append(sum(step.nodes for text in texts for step in text.trace.steps))
    return found


def test_what_is_kept_for_later_texts_gives_way_to_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drafted(800 * SLOT) == drafted(0)
    # Wrong: drafts get what is left beside it.
    monkeypatch.setattr("decodery.engine.memory._EVICTIONS", 0)
    assert sum(drafted(800 * SLOT)) < 0.7 * sum(drafted(0))


@pytest.mark.parametrize("settings", [{"prompt_logprobs": 1}, {"drafter": Shown()}], ids=["logprobs", "drafter"])
def test_logits_of_short_prompts_take_the_rows_they_have(settings: dict[str, Any]) -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=1200 * SLOT))
    texts = [engine.submit(Request([number] * 10, max_new_tokens=20, **settings)) for number in range(6)]
    engine.step()
    assert engine.running == 6
    engine.run(texts)


def test_who_waits_comes_in_once_the_prompt_it_shares_was_read() -> None:
    """What it needs is less from then on, though no task has come or left."""
    engine = Engine(MODEL, limits=Limits(cache_bytes=340 * SLOT), prefill_chunk=64)
    request = Request([number * 7 % 512 for number in range(200)], max_new_tokens=30)
    first = engine.submit(request)
    others = [engine.submit(request, like=first) for _ in range(2)]
    while not first.position:
        engine.step()
    assert engine.waiting == 2
    engine.step()
    engine.step()
    assert not engine.waiting and not first.finished
    engine.run([first, *others])


def test_who_waits_comes_in_once_the_rows_of_a_prompt_were_read() -> None:
    """Their logits are gone then."""
    engine = Engine(MODEL, limits=Limits(cache_bytes=700 * SLOT))
    first = engine.submit(Request([5] * 200, max_new_tokens=30, prompt_logprobs=1))
    other = engine.submit(Request([9] * 100, max_new_tokens=4))
    while not first.position:
        engine.step()
    assert engine.waiting == 1
    engine.step()
    assert not engine.waiting
    engine.run([first, other])


def test_a_text_that_goes_on_without_drafts_needs_no_rows_of_its_prompt() -> None:
    engine = Engine(MODEL, limits=Limits(cache_bytes=1200 * SLOT))
    for asked in (None, 1):
        engine.submit(Request([5] * 60, max_new_tokens=4, drafter=Shown(), prompt_logprobs=asked))
    runs = [*engine._schedule._waiting]
    rows = [[engine._schedule.memory._logits([run, run]) // (2 * 512 * 4)] for run in runs]
    for run, found in zip(runs, rows, strict=True):
        assert _without_drafts(run)
        found.append(engine._schedule.memory._logits([run, run]) // (2 * 512 * 4))
    assert rows == [[60, 1], [60, 60]]
