"""Discrete key-value bottleneck: keys stay, a sample moves the values it finds alone, and drafts change no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodery.core.errors import DecoderyError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.trained.artifact import Artifact
from decodery.speculative.drafters.discrete_key_value import DiscreteKeyValue
from decodery.speculative.stores.bottleneck import KeySet, Values, nearest
from decodery.step.drafter_memory import Memory
from decodery.testing import tiny_transformer
from decodery.training.kv_bottleneck import KeyRecipe, learn_keys, quantized

RECIPE = KeyRecipe(codebooks=4, keys=8, dim=4, rank=16)
MODEL = tiny_transformer(2)
TEXTS = [list(range(seed, 60)) for seed in (1, 5, 9)]
KEYS = learn_keys(MODEL, TEXTS, recipe=RECIPE)


def test_a_step_moves_the_values_that_were_found_and_no_others() -> None:
    values, chance = Values(KEYS, 2, 0.5), torch.Generator().manual_seed(0)
    values.data.normal_(generator=chance)
    states = torch.randn(40, MODEL.config.hidden_size, generator=chance)
    codes = KEYS.codes(states)
    apart = int((codes != codes[0]).all(dim=1).nonzero()[0])
    frozen = [each.clone() for each in (KEYS.keys, KEYS.projections, KEYS.readout)]
    before, other = values.data.clone(), values.logits(1, codes[apart])
    # The gradient is that of the loss, of which every value has a C-th.
    data = values.data.clone().requires_grad_()
    logits = data[1, torch.arange(4), codes[0]].mean(dim=0) @ KEYS.readout
    torch.nn.functional.cross_entropy(logits[None], torch.tensor([7])).backward()
    values.learn(1, codes[0], 7)
    assert data.grad is not None
    assert torch.allclose(values.data, before - 0.5 * 4 * data.grad, atol=1e-5)
    changed = (values.data != before).any(dim=-1)
    assert changed.sum() == 4 and changed[1, torch.arange(4), codes[0]].all()
    assert torch.equal(values.logits(1, codes[apart]), other)
    assert all(torch.equal(a, b) for a, b in zip((KEYS.keys, KEYS.projections, KEYS.readout), frozen, strict=True))
    # A linear layer in the place of keys and values forgets: the same step changes what it says of the other state.
    weight = torch.zeros(16, MODEL.config.hidden_size, requires_grad=True)
    torch.nn.functional.cross_entropy((weight @ states[0] @ KEYS.readout)[None], torch.tensor([7])).backward()
    assert weight.grad is not None and (weight.grad @ states[apart]).abs().max() > 1e-3


def test_keys_are_where_states_are() -> None:
    """Planted clusters are found whatever their channels' sizes, and a state finds its own."""
    chance = torch.Generator().manual_seed(1)
    middles = torch.randn(8, 12, generator=chance)
    place = torch.randint(8, (4000,), generator=chance)
    states = (middles[place] + 0.02 * torch.randn(4000, 12, generator=chance)) * torch.logspace(-2, 2, 12)
    keys, centre, projections = quantized(states, replace(RECIPE, keys=24, dim=6))
    rows = torch.einsum("nw,cdw->ncd", states - centre, projections)
    codes = nearest(rows, keys)
    for book in range(4):
        lost = (rows[:, book] - keys[book][codes[:, book]]).square().sum() / rows[:, book].square().sum()
        assert lost < 0.01
        # Every key that is found belongs to one cluster alone.
        pairs = {(int(code), int(own)) for code, own in zip(codes[:, book], place, strict=True)}
        assert len(pairs) == len({code for code, _ in pairs}) >= 8
    distances = torch.cdist(rows[:9].transpose(0, 1), keys).transpose(0, 1)
    assert torch.equal(nearest(rows[:9], keys), distances.argmin(dim=2))


def test_drafts_change_no_text_and_come_true_where_a_text_repeats_itself() -> None:
    memory, texts, passes = Memory(), [], []
    drafter = DiscreteKeyValue(KEYS, lr=4.0)
    for each in (None, drafter, drafter, replace(drafter, scope="request")):
        engine = Engine(MODEL, memory=memory)
        seq = engine.submit(Request(TEXTS[0][:9], max_new_tokens=40, drafter=each))
        engine.run([seq])
        texts.append(seq.generated)
        passes.append(len(seq.trace.steps))
    assert all(each == texts[0] for each in texts)
    # What was learned of the first text is there for the next one, but where each text has a memory of its own.
    assert passes[2] < passes[1] <= passes[0] and passes[3] == passes[1]


def test_keys_are_kept_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    KEYS.save(tmp_path / KeySet.FILE)
    read = KeySet.load(tmp_path)
    states = torch.randn(5, MODEL.config.hidden_size)
    assert torch.equal(read.codes(states), KEYS.codes(states)) and read.facts["tokens"] == sum(map(len, TEXTS))
    Artifact("set of keys", {"keys": KEYS.keys}).save(tmp_path / "part.safetensors")
    other = replace(KEYS, keys=KEYS.keys[:2])
    other.save(tmp_path / "misfit.safetensors")
    for wrong in (
        lambda: Engine(tiny_transformer(3)).submit(Request([1], drafter=DiscreteKeyValue(KEYS))),
        lambda: Engine(MODEL).submit(Request([1], drafter=DiscreteKeyValue())),
        lambda: KeySet.load(tmp_path / "part.safetensors"),
        lambda: KeySet.load(tmp_path / "misfit.safetensors"),
        lambda: KeySet.load(tmp_path / "none"),
        lambda: learn_keys(MODEL, [[1, 2]], recipe=RECIPE),
        lambda: DiscreteKeyValue(KEYS, length=0),
        lambda: KeyRecipe(decay=1.0),
    ):
        with pytest.raises(DecoderyError):
            wrong()
