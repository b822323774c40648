"""What drafters read with other models is in the account: no pass is refused, and no text ends for want of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Ordered

import numpy as np
import pytest

from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.engine.schedule import Limits, Schedule, _without_drafts
from decodery.engine.task import SchedulerEntry
from decodery.sampling.constraint import Constrained, Constraint
from decodery.sampling.sampler import Sampler
from decodery.sampling.temperature import Temperature
from decodery.speculative.drafters.advice import Advice
from decodery.speculative.drafters.auto import Auto
from decodery.speculative.drafters.combine import cascade
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.following import Following
from decodery.speculative.drafters.forced import Forced
from decodery.speculative.drafters.pearl import Pearl
from decodery.speculative.drafters.prompt_lookup import PromptLookup
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence
from decodery.testing import decode, tiny_transformer, to_int8

MODEL, SMALL = (
    to_int8(tiny_transformer(seed, num_layers=layers, max_positions=256)) for seed, layers in ((0, 2), (1, 1))
)
SLOT = MODEL.new_cache().slot_bytes
DRAFTERS: list[Drafter | None] = [
    None,
    DraftModel(SMALL),
    DraftModel(SMALL),
    cascade(PromptLookup(), DraftModel(SMALL)),
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerEntry]:
    """The tasks that found no memory in a pass."""
    found = list[SchedulerEntry]()
    starve = Schedule.starve

    def counted(schedule: Schedule, run: SchedulerEntry) -> bool:
        found.append(run)
        return starve(schedule, run)

    monkeypatch.setattr(Schedule, "starve", counted)
    return found


def traffic(seed: int) -> list[Sequence]:
    """Random arrivals under a limit that holds a few of the texts, to the end of all."""
    chance, texts, owners = random.Random(seed), list[Sequence](), ("one", "other")
    engine = Engine(MODEL, limits=Limits(cache_bytes=420 * SLOT, owner_part=0.8), prefill_chunk=48)
    for step in range(800):
        if step < 60 and chance.random() < 0.5:
            prompt = [chance.randrange(64) for _ in range(chance.choice([3, 20, 60, 110]))]
            settings = {"drafter": chance.choice(DRAFTERS), "max_draft_tokens": 4, "seed": step}
            request = Request(prompt, max_new_tokens=chance.randrange(2, 60), **settings)
            request.cache_namespace = chance.choice(owners)
            texts.append(engine.submit(request))
        engine.step()
        limit = engine._schedule.memory.limit
        assert limit is not None and limit.peak <= limit.most
        if step >= 60 and all(text.finished for text in texts):
            break
    assert all(text.finished for text in texts) and engine.preemptions
    return texts


@pytest.mark.parametrize("seed", range(3))
def test_no_pass_is_refused(seed: int, refused: list[SchedulerEntry]) -> None:
    for text in traffic(seed):
        request = text.request
        (plain,) = decode(MODEL, [text.tokens[: request.prompt_length]], max_new_tokens=request.max_new_tokens)
        assert text.error is None and text.generated == plain.generated
    assert not refused


def test_passes_are_refused_where_drafts_are_not_counted(
    refused: list[SchedulerEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Following, "more_for", Drafter.more_for)
    for seed in range(3):
        traffic(seed)
    assert refused


LARGE: dict[str, Callable[[], Drafter]] = {
    "draft-model": lambda: DraftModel(SMALL),
    "pearl": lambda: Pearl(SMALL),
    "auto": lambda: Auto(warm=None, model=SMALL),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_text_goes_on_without_models_that_there_is_no_memory_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advice, "choose", lambda advice, seq, hoped: True)
    monkeypatch.setattr(Advice, "pays", lambda advice, node, hoped: True)
    monkeypatch.setattr(Advice, "silence", lambda advice, seq: 0)
    prompt = np.random.default_rng(5).integers(0, 64, 80).tolist()
    (plain,) = decode(MODEL, [prompt], max_new_tokens=40)

    def written(slots: int) -> Sequence:
        limits = Limits(cache_bytes=slots * SLOT)
        engine = Engine(MODEL, limits=limits, pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))
        text = engine.submit(Request(prompt, max_new_tokens=40, drafter=LARGE[name]()))
        engine.run([text])
        assert text.generated == plain.generated
        return text

    roomy, tight = written(400), written(136)
    assert roomy.trace.ledger.passes["draft"] and not any("no memory" in note for note in roomy.trace.notes)
    found = [note for note in tight.trace.notes if "no memory" in note]
    if name == "draft-model":
        # Where there is no room for its cache it is not asked.
        assert not found and "draft" not in tight.trace.ledger.passes
    else:
        assert len(found) == 1 and ("a second model" in found[0]) == (name == "auto")
        assert isinstance(tight.request.drafter, Auto) == (name == "auto")


class Everything(Constraint):
    """Allows all tokens."""

    def init(self, prompt: Ordered[int]) -> None:
        pass

    def allowed(self, state: None) -> np.ndarray:
        return np.ones(64, dtype=bool)

    def advance(self, state: None, token: int) -> None:
        pass

    def is_complete(self, state: None) -> bool:
        return True


def test_a_constrained_text_keeps_the_drafts_that_need_no_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advice, "choose", lambda advice, seq, hoped: True)
    monkeypatch.setattr(Advice, "pays", lambda advice, node, hoped: True)
    monkeypatch.setattr(Advice, "silence", lambda advice, seq: 0)
    engine = Engine(MODEL, pass_seconds=lambda context: 1.0 + 0.01 * np.arange(1024))
    prompt = np.random.default_rng(5).integers(0, 64, 80).tolist()
    sampler = Sampler([Constrained(Everything()), Temperature(0.0)])
    text = engine.submit(Request(prompt, max_new_tokens=40, drafter=Auto(warm=None, model=SMALL), sampler=sampler))
    while not (asked := text.trace.ledger.passes.get("draft", 0)) and not text.finished:
        engine.step()
    assert asked and not text.finished
    assert _without_drafts(engine._schedule.runs[0])
    assert isinstance(text.request.drafter, Forced) and "a second model" in text.trace.notes[-1]
    engine.run([text])
    assert text.trace.ledger.passes["draft"] == asked
    assert text.generated == decode(MODEL, [prompt], max_new_tokens=40)[0].generated
    assert not text.request.drafter.drops_models(text), "there is none left"
