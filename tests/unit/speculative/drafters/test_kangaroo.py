"""Kangaroo: first layers draft, the others verify, and nothing is read twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covering import FULL
from decodery.core.errors import SettingsError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Scores, Segment
from decodery.models.layer_plan import WHOLE
from decodery.models.torch.transformer import Transformer
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.judge import Head, Judge
from decodery.speculative.acceptance.rejection import Rejection
from decodery.speculative.drafters.kangaroo import Kangaroo, KangarooHead
from decodery.speculative.heads.head import TrainedHead
from decodery.speculative.heads.parts import Held
from decodery.step.draft_length_policy import Budget
from decodery.step.forward_request import run_sync
from decodery.testing import check_identical, check_state, tiny_transformer
from decodery.testing.models import to_int8

TARGET = tiny_transformer(0, num_layers=4)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def trained(leave: int = 2, seed: int = 1) -> TrainedHead:
    tensors, about = KangarooHead.untrained(TARGET, seed=0)
    random = torch.Generator().manual_seed(seed)
    shaken = {
        name: each + 0.3 * torch.randn(each.shape, generator=random, dtype=each.dtype) / each.shape[-1] ** 0.5
        for name, each in tensors.items()
    }
    return TrainedHead("kangaroo", shaken, about | {"exit": leave})


def perfect() -> tuple[Transformer, TrainedHead]:
    """A target whose last layer adds nothing, and an adapter before it that adds nothing either."""
    target = tiny_transformer(0, num_layers=4)
    target.weights.layers[3].output.weight.zero_()
    target.weights.layers[3].down.weight.zero_()
    tensors, about = KangarooHead.untrained(target, seed=0)
    tensors["layer.output.weight"] = torch.zeros_like(tensors["layer.output.weight"])
    return target, TrainedHead("kangaroo", tensors, about | {"exit": 3})


class Watched:
    """A target whose passes are written down: how many rows went through which layers."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.passes = model, list[tuple[range, int]]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = self.model.forward

        def forward(batch: Batch, *, taps: tuple[int, ...] = (), layer_plan=WHOLE) -> Scores:
            layers = range(self.model.config.num_layers) if layer_plan.layers is None else layer_plan.layers
            self.passes.append((range(layers[0], layers[-1] + 1), batch.rows))
            return plain(batch, taps=taps, layer_plan=layer_plan)

        monkeypatch.setattr(self.model, "forward", forward)


def test_adapter_rows_are_those_of_training() -> None:
    head = KangarooHead(trained(), TARGET)
    states = TARGET.forward(Batch([Segment.chunk(TEXT, TARGET.new_cache())]), taps=(2,)).hidden[2]
    (guess,) = head.unroll({2: states[None]}, torch.tensor([TEXT]), 1)
    for end in (3, 9):
        held = Held.begin(2, 8, states)
        head.keep(held, states[:end], np.arange(end))
        first = head.guess(held, states[end : end + 1], np.array([end]), np.ones((1, 1), dtype=bool))
        second = head.guess(held, states[end + 1 : end + 2], np.array([end + 1]), np.ones((1, 2), dtype=bool))
        for found, place in ((first, end), (second, end + 1)):
            assert float((found[0] - head.project(guess.spoken[0, place : place + 1])[0]).abs().max()) < 1e-9


def test_layers_apart_are_the_whole() -> None:
    """Rows that enter after the first layers score as if they had come all the way, and become the same cache."""
    drafter = Kangaroo(trained(), eta=0.0, length=4)
    engine = Engine(TARGET)
    seq = engine.submit(Request([1, 2, 3], max_new_tokens=30, drafter=drafter))
    while not seq.position:
        engine.step()
    tree = run_sync(drafter.propose(seq, Budget(8, 8)))
    assert len(tree) == 5 and tree.entered is not None and tree.entered.states.shape == (5, 32)
    batch = Batch([Segment.chunk([*seq.tokens, *tree.tokens[1:].tolist()], TARGET.new_cache())])
    whole = TARGET.forward(batch, taps=(2,)).hidden[2][-5:]
    assert float((tree.entered.states - whole).abs().max()) < 1e-12


WAYS = (0.0, None), (0.05, None), (0.0, "eagle-2(nodes=5, width=2, depth=2)")


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_texts_and_caches_are_those_of_plain_decoding(number: int) -> None:
    (eta, growth), wrong = WAYS[number], [(TARGET, trained()), (TARGET, trained(3))]
    for target, head in (*(wrong if FULL else wrong[number % 2 :][:1]), perfect()):
        drafter = Kangaroo(head, eta=eta, tree_policy=growth) if growth else Kangaroo(head, eta=eta, length=3)
        tested = "drafted" if target is TARGET else "accepted"
        check_identical(target, [[1, 2, 3], [5] * 8], drafter=drafter, max_new_tokens=9, seeds=(0,), tested=tested)
        check_state(target, [[1, 2, 3]], drafter=drafter, max_new_tokens=9)
    sampler = Sampler.from_settings(temperature=1.0)
    check_state(target, [[7, 9]], drafter=drafter, acceptance_rule=Rejection(), sampler=sampler, max_new_tokens=14)


def test_int8_texts_are_those_of_plain_decoding() -> None:
    for target, head in ((TARGET, trained()), perfect()):
        settings = {"drafter": Kangaroo(head, eta=0.0), "max_new_tokens": 16, "seeds": (0,)}
        check_identical(to_int8(target), [[1, 2, 3]], tested="drafted", **settings)


def test_drafts_that_are_all_accepted_leave_nothing_out() -> None:
    """With an adapter that is always right every draft is accepted, and the adapter has read all that the cache has."""
    target, head = perfect()
    engine = Engine(target)
    seq = engine.submit(Request([1, 2, 3], max_new_tokens=13, drafter=Kangaroo(head, eta=0.0, length=3)))
    engine.run([seq])
    assert [step.emitted for step in seq.trace.decoding] == [4, 4, 4]
    reading = seq.states[seq.request.drafter]
    assert reading.held.length + sum(len(states) for states, _ in reading.fresh) == len(seq.tokens) - 1


@pytest.mark.parametrize("leave", [1, 2, 3])
def test_no_layer_reads_a_token_twice(leave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_transformer(0, num_layers=4)
    watched = Watched(target)
    drafter = Kangaroo(trained(leave), eta=0.0, length=3)
    engine = Engine(target)
    seq = engine.submit(Request([1, 2, 3], max_new_tokens=20, drafter=drafter))
    while not seq.position:
        engine.step()
    watched.install(monkeypatch)
    before = len(seq.trace.decoding)
    while len(seq.trace.decoding) == before:
        engine.step()
    first, rest = range(leave), range(leave, 4)
    assert watched.passes == [(first, 1)] * 4 + [(rest, 4)]


def test_who_looks_into_the_first_layers_has_all_of_them_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_transformer(0, num_layers=4)
    watched = Watched(target)
    rule = Judge(Head(torch.linspace(-1, 1, 32), 0.1, layer=1))
    engine = Engine(target)
    drafter = Kangaroo(trained(2), eta=0.0, length=3)
    seq = engine.submit(Request([1, 2, 3], max_new_tokens=20, drafter=drafter, acceptance_rule=rule))
    while not seq.position:
        engine.step()
    watched.install(monkeypatch)
    before = len(seq.trace.decoding)
    while len(seq.trace.decoding) == before:
        engine.step()
    assert watched.passes[-1] == (range(4), 4)


def test_a_token_that_is_not_sure_ends_a_draft() -> None:
    lengths = {}
    for eta in (0.0, 1.0):
        drafter = Kangaroo(trained(), eta=eta, length=3)
        engine = Engine(TARGET)
        seq = engine.submit(Request([1, 2, 3], max_new_tokens=20, drafter=drafter))
        engine.run([seq])
        lengths[eta] = [step.nodes for step in seq.trace.decoding][:-3]
    assert set(lengths[0.0]) == {3}
    # It is still drafted and verified itself.
    assert set(lengths[1.0]) == {1}
    with pytest.raises(SettingsError, match="eta from 0 to 1"):
        Kangaroo(trained(), eta=2.0)
