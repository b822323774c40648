"""Drafting while the target verifies: the same text in whatever order the two run, and what a right guess saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.torch.transformer import Transformer
from decodery.sampling import Sampler
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.speculative.drafters.pearl import Pearl
from decodery.step import forward_request as ask
from decodery.step import parallel_passes as workers
from decodery.step.forward_request import ForwardCoroutine, ForwardRequest, answer
from decodery.step.pass_prices import PassPrices, Promises
from decodery.step.prior_prices import PriorPrices
from decodery.testing import check_identical, decode, tiny_transformer
from decodery.testing.models import Counted

TARGET = tiny_transformer(0, num_layers=4)
OTHER = tiny_transformer(1, num_layers=2)
PROMPTS = [[1, 2, 3], [5] * 6 + [7, 8, 9] * 4]


def half(model: Transformer) -> Transformer:
    """Its first layers, which agree with it now and then."""
    config = replace(model.config, num_layers=3, sliding_layers=model.config.sliding_layers[:3])
    return Transformer(config, replace(model.weights, layers=list(model.weights.layers[:3])))


def texts(parallel: bool, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[tuple[list[int], int]]:
    monkeypatch.setattr(workers, "cores", lambda: 2 if parallel else 1)
    runs = decode(TARGET, PROMPTS, drafter=Pearl(half(TARGET), length=3), max_new_tokens=20, **settings)  # type: ignore[arg-type]
    return [(run.generated, run.trace.passes) for run in runs]


def test_texts_and_passes_are_the_same_in_turns_and_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (
        {},
        {"sampler": Sampler.from_settings(temperature=0.8, top_p=0.9), "acceptance_rule": Rejection()},
    ):
        assert texts(True, monkeypatch, **settings) == texts(False, monkeypatch, **settings)
    monkeypatch.setattr(workers, "cores", lambda: 2)
    sampler = Sampler.from_settings(temperature=0.8)
    check_identical(TARGET, PROMPTS, drafter=Pearl(half(TARGET), length=3), sampler=sampler, max_new_tokens=20)


class Waits(Counted):
    """A model whose pass is not over before a pass of another one has begun."""

    def __init__(self, model: Transformer, begun: Event, other: Event) -> None:
        super().__init__(model)
        self.begun, self.other, self.met, self.patience = begun, other, 0, 3.0

    def forward(self, batch: Batch, **settings: object) -> Scores:
        self.begun.set()
        self.met += self.other.wait(self.patience)
        self.other.clear()
        return super().forward(batch, **settings)  # type: ignore[arg-type]


def test_both_models_are_at_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 2)
    one, two = Event(), Event()
    target, draft = Waits(TARGET, one, two), Waits(half(TARGET), two, one)
    (run,) = decode(target, PROMPTS[:1], drafter=Pearl(draft, length=1), max_new_tokens=6)
    assert target.met == draft.met >= run.trace.passes - 1


class Ticks(Counted):
    """A model whose passes take a number of ticks of a clock."""

    def __init__(self, model: Transformer, clock: list[int], ticks: int) -> None:
        super().__init__(model)
        self.clock, self.ticks = clock, ticks

    def forward(self, batch: Batch, **settings: object) -> Scores:
        self.clock[0] += self.ticks
        return super().forward(batch, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", [4, 6, 9])
def test_a_round_takes_as_long_as_the_slower_of_the_two_by_a_clock_of_ticks(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0]

    def at_once(main: Callable[[], object], beside: Callable[[], object], waits: bool) -> tuple[object, object]:
        begin = clock[0]
        first, spent = main(), clock[0] - begin
        clock[0] = begin
        second = beside()
        clock[0] = max(clock[0], begin + spent)
        return first, second

    monkeypatch.setattr(ask, "side_by_side", at_once)
    target, draft = Ticks(TARGET, clock, slow), Ticks(half(TARGET), clock, 2)
    rounds = {}
    for name, drafter in (("beside", Pearl(draft, length=3)), ("in turns", DraftModel(draft, length=3))):
        engine, clock[0], rounds[name] = Engine(target), 0, []
        seq = engine.submit(Request(PROMPTS[1], drafter=drafter, max_new_tokens=24))
        while not seq.finished:
            passes, begin = seq.trace.ledger.passes.get("draft", 0), clock[0]
            engine.step()
            rounds[name].append((2 * (seq.trace.ledger.passes.get("draft", 0) - passes), clock[0] - begin))
    assert all(taken == max(drafting, slow) for drafting, taken in rounds["beside"])
    assert all(taken == drafting + slow for drafting, taken in rounds["in turns"])
    assert any(drafting == 6 for drafting, _ in rounds["beside"]) and any(
        drafting for drafting, _ in rounds["in turns"]
    )


def test_a_target_on_a_device_of_its_own_is_waited_for_at_work_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 1)
    rows = Segment(np.arange(2), np.array([1, 2]))
    for device, met in (("meta", 1), ("cpu", 0)):
        one, two = Event(), Event()
        target, draft = Waits(TARGET, one, two), Waits(OTHER, two, one)
        target.device, target.patience = torch.device(device), 3.0 if met else 0.05

        def drafts(draft: Waits = draft) -> ForwardCoroutine[None]:
            yield [ForwardRequest(draft, rows)]

        with torch.no_grad():
            (scored,) = answer([ForwardRequest(target, rows, beside=drafts())])
        assert not isinstance(scored, Exception) and target.met == met


def test_a_draft_that_is_always_right_costs_no_more_rounds_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 1)
    draft = Counted(TARGET)
    (right,) = decode(TARGET, PROMPTS[:1], drafter=Pearl(draft, length=4), max_new_tokens=21)
    # The prompt's pass foretells what follows it, and then every pass finds a draft of three and its own token: no
    # pass of the target is spent on one row, and every round writes four tokens.
    assert right.trace.passes == 5
    assert [step.emitted for step in right.trace.steps] == [1, 4, 4, 4, 4, 4]
    # A round of the draft is as many passes as it has tokens: what it read before is not read again.
    ledger = right.trace.ledger
    assert ledger.passes["draft"] <= 4 * 6 and ledger.rows["draft"] <= len(PROMPTS[0]) + 4 * 6
    (plain,) = decode(TARGET, PROMPTS[:1], drafter=DraftModel(TARGET, length=4), max_new_tokens=21)
    assert plain.generated == right.generated
    # One that is always wrong leaves the target alone with one row a pass.
    (wrong,) = decode(TARGET, PROMPTS[:1], drafter=Pearl(OTHER, length=4), max_new_tokens=12)
    assert wrong.trace.passes >= 8


def test_what_fails_beside_a_pass_ends_that_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 2):
        monkeypatch.setattr(workers, "cores", lambda count=count: count)

        def fails() -> ForwardCoroutine[None]:
            yield [ForwardRequest(OTHER, Segment(np.arange(2), np.array([1, 2])))]
            raise ValueError("beside")

        rows = Segment(np.arange(2), np.array([1, 2]))
        with torch.no_grad():
            bad, good = answer(
                [
                    ForwardRequest(TARGET, rows, beside=fails()),
                    ForwardRequest(TARGET, Segment(np.arange(1), np.array([1]))),
                ]
            )
        assert isinstance(bad, ValueError) and not isinstance(good, Exception)


def test_its_length_comes_from_what_passes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {id(TARGET): 7.1, id(OTHER): 1.0}

    def prices(model: object) -> tuple[PassPrices, Promises]:
        return PassPrices(PriorPrices(times[id(model)], 0.0)), Promises()

    monkeypatch.setattr("decodery.speculative.drafters.pearl.prices_of", prices)
    seq = Engine(TARGET).submit(Request([1, 2, 3], max_new_tokens=4))
    assert Pearl(OTHER, length=0).start(seq).length == 7
    with pytest.raises(SettingsError, match="pearl needs length"):
        Pearl(OTHER, length=-1)
