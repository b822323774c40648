"""The dial of localist attention: its ends are the model and its blocks, and what it takes is the closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError
from decodery.kv_cache.localist import Localist
from decodery.models.batch import Batch, Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.torch.transformer import Transformer
from decodery.testing import check_identical, tiny_transformer
from decodery.testing.models import to_int8

MODEL = tiny_transformer(0)
IDS = np.random.default_rng(0).integers(0, 64, 40)


class Watched(AttentionPolicy):
    """A policy whose first layer is written down."""

    observes = True

    def __init__(self, policy: object, into: list[Attention]) -> None:
        self.policy, self.into = policy, into

    def select(self, attention: Attention) -> np.ndarray | None:
        return self.policy.select(attention)  # type: ignore[attr-defined, no-any-return]

    def observe(self, attention: Attention) -> None:
        if attention.layer == 0:
            self.into.append(attention)


def read(method: Localist, model: Transformer = MODEL) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all rows, and the first layer's weights [heads, n, n]."""
    cache, seen = model.new_cache(), list[Attention]()
    cache.policy = Watched(method.state(model, 1), seen)
    logits = model.forward(Batch([Segment.chunk(IDS, cache)])).logits
    assert seen[0].weights is not None
    return logits, seen[0].weights


def outside(method: Localist) -> np.ndarray:
    places = np.arange(len(IDS))
    return (places[:, None] // method.block != places // method.block) & (places >= method.sinks)[None]


def test_the_ends_of_the_dial_are_the_model_and_its_blocks() -> None:
    plain = MODEL.forward(Batch([Segment.chunk(IDS, MODEL.new_cache())])).logits
    whole, weights = read(Localist(0.0, block=8, sinks=2))
    assert torch.allclose(whole, plain, atol=1e-12)
    # In int8, whose rows are exact, to the bit.
    exact = to_int8(tiny_transformer(0, dtype=torch.float32))
    assert torch.equal(read(Localist(0.0), exact)[0], exact.forward(Batch([Segment(np.arange(40), IDS)])).logits)
    method = Localist(1.0, block=8, sinks=2)
    out = torch.from_numpy(outside(method))
    _, alone = read(method)
    kept = weights.masked_fill(out, 0.0)
    assert torch.allclose(alone, kept / kept.sum(dim=-1, keepdim=True), atol=1e-12) and (alone[:, out] == 0).all()


def test_what_other_blocks_get_is_the_closed_form_and_entropy_falls() -> None:
    out = torch.from_numpy(outside(Localist(block=8, sinks=2)))
    mass = read(Localist(0.0, block=8, sinks=2))[1].masked_fill(~out, 0.0).sum(dim=-1)
    last, entropies = mass, []
    for dial in (0.0, 0.3, 0.6, 0.9, 0.99, 1.0):
        weights = read(Localist(dial, block=8, sinks=2))[1]
        found = weights.masked_fill(~out, 0.0).sum(dim=-1)
        assert torch.allclose(found, mass * (1 - dial) / (1 - mass * dial), atol=1e-9)
        assert (found <= last + 1e-12).all()
        last = found
        entropies.append(float(-torch.special.xlogy(weights, weights).sum(dim=-1).mean()))
    assert entropies == sorted(entropies, reverse=True)
    # Scores lowered by the dial itself would leave more.
    assert not torch.allclose(mass * np.exp(-0.6) / (1 - mass + mass * np.exp(-0.6)), mass * 0.4 / (1 - mass * 0.6))


def test_it_drafts_for_the_model_itself() -> None:
    prompts = [IDS.tolist(), [5, 6, 7] * 6]
    for dial in (0.5, 1.0):
        drafter = f"compressed-cache:length=3,cache_policy=localist(dial={dial},block=8,sinks=2)"
        check_identical(MODEL, prompts, drafter=drafter, max_new_tokens=12)


@pytest.mark.parametrize("settings", [{"dial": 1.1}, {"dial": -0.1}, {"block": 0}, {"sinks": -1}])
def test_what_is_no_dial_is_refused(settings: dict) -> None:
    with pytest.raises(SettingsError, match="localist"):
        Localist(**settings)
