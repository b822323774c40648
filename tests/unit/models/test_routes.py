"""Routes: a pass cut in pieces is the whole pass, and what is skipped leaves nothing after."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.layer_plan import WHOLE, LayerPlan
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.models.transformers.adapter import TransformersModel
from decodery.testing import tiny_transformer
from open_models import BACKENDS, LAYERS, make, same
from tiny_models import make_model

TOKENS = np.random.default_rng(1).integers(0, 64, 40)
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
DEPTHS = TREE.sum(axis=1) - 1
LOWER, UPPER = LayerPlan((0, 1)), LayerPlan((2, 3))


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return make(request.param)


def prefilled(model: Transformer, n: int) -> KVCache:
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(TOKENS[:n], cache)]))
    cache.keep(range(n))
    return cache


def tree(cache: KVCache, **given: object) -> Segment:
    positions = cache.next_position + DEPTHS
    return Segment(positions, **({"tokens": TOKENS[20:24], "mask": TREE, "cache": cache} | given))  # type: ignore[arg-type]


def next_logits(model: Transformer, cache: KVCache) -> torch.Tensor:
    return model.forward(Batch([Segment.chunk(TOKENS[30:33], cache)])).logits


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_in_two_pieces_is_the_whole_pass(backend: str, gemma: bool) -> None:
    model = make(backend, gemma=gemma)
    whole, parted = prefilled(model, 9), prefilled(model, 9)
    expected = model.forward(Batch([tree(whole)])).logits
    states = model.forward(Batch([tree(parted, logit_rows=[])]), taps=(2,), layer_plan=LOWER).hidden_of(0, 2)
    logits = model.forward(Batch([tree(parted, tokens=None, states=states)]), layer_plan=UPPER).logits
    assert same(logits, expected)
    for cache in (whole, parted):
        cache.keep([0, 2, 3])
    assert parted.lengths.tolist() == [12] * LAYERS
    assert same(next_logits(model, parted), next_logits(model, whole))


def test_rows_drafted_one_by_one_below_are_verified_together_above(model: Transformer) -> None:
    """As early exits draft: shallow passes feed a token each, then all rows enter the upper layers at once."""
    whole, parted = prefilled(model, 9), prefilled(model, 9)
    expected = model.forward(Batch([Segment.chunk(TOKENS[9:14], whole)])).logits
    states = []
    for step in range(5):
        segment = Segment(np.array([9 + step]), TOKENS[9 + step : 10 + step], cache=parted, retained=step)
        states.append(model.forward(Batch([segment]), taps=(2,), layer_plan=LOWER).hidden_of(0, 2))
    above = Segment(np.arange(9, 14), states=torch.cat(states), cache=parted)
    assert same(model.forward(Batch([above]), layer_plan=UPPER).logits, expected)
    for cache in (whole, parted):
        cache.keep([0, 1, 2])
    assert parted.lengths.tolist() == [12] * LAYERS
    assert same(next_logits(model, parted), next_logits(model, whole))


def test_rows_that_enter_elsewhere_forget_what_was_below(model: Transformer) -> None:
    cache = prefilled(model, 9)
    states = model.forward(Batch([tree(cache)]), taps=(2,), layer_plan=LOWER).hidden_of(0, 2)
    moved = Segment(cache.next_position + np.array([0, 1, 2, 3]), states=states, cache=cache)
    model.forward(Batch([moved]), layer_plan=UPPER)
    # Rows 0 and 1 stand where they stood, row 2 does not, and nobody gave the lower layers anything there.
    cache.keep([0, 1, 2, 3])
    assert cache.lengths.tolist() == [11, 11, 13, 13]


def test_the_head_follows_wherever_rows_leave(model: Transformer) -> None:
    batch = Batch([Segment(np.arange(6), TOKENS[:6], logit_rows=[1, 5])])
    scores = model.forward(batch, taps=(2, "final_norm"), layer_plan=LOWER)
    assert same(scores.logits, model.head(scores.hidden_of(0, 2)[[1, 5]]))
    assert same(scores.logits, model.project(scores.hidden_of(0, "final_norm")))
    assert not same(scores.logits, model.forward(batch).logits)


@pytest.mark.parametrize("skipped", [["attention.1"], ["mlp.1"], ["attention.1", "mlp.1"], ["mlp.0", "attention.3"]])
@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
def test_a_skipped_sublayer_is_one_that_adds_nothing(skipped: list[str], gemma: bool) -> None:
    model = make("float64", gemma=gemma)
    layers = list(model.weights.layers)
    for name in skipped:
        kind, layer = name.split(".")
        part = "output" if kind == "attention" else "down"
        nothing = Dense(torch.zeros_like(getattr(layers[int(layer)], part).weight))
        layers[int(layer)] = replace(layers[int(layer)], **{part: nothing})
    without = Transformer(model.config, replace(model.weights, layers=layers))
    batch = Batch([Segment(np.arange(12), TOKENS[:12])])
    layer_plan = LayerPlan(skip=frozenset(skipped))
    assert same(model.forward(batch, layer_plan=layer_plan).logits, without.forward(batch).logits)
    assert not same(model.forward(batch).logits, without.forward(batch).logits)


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("skipped", [["attention.1"], ["mlp.1", "attention.2"], ["attention.0", "mlp.0"]])
def test_kernels_skip_what_torch_skips(skipped: list[str], gemma: bool) -> None:
    layer_plan = LayerPlan(skip=frozenset(skipped))
    found = []
    for backend in ("native", "portable"):
        model = make(backend, gemma=gemma)
        cache = prefilled(model, 7)
        scores = model.forward(
            Batch([tree(cache), Segment(np.arange(5), TOKENS[:5])]), taps=(1, -1), layer_plan=layer_plan
        )
        found.append((scores.logits, scores.hidden[1], scores.hidden[-1]))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_a_draft_with_skips_leaves_the_cache_to_the_whole_pass(model: Transformer) -> None:
    whole, drafted = prefilled(model, 9), prefilled(model, 9)
    skipping = LayerPlan(skip=frozenset({"attention.1", "mlp.2"}))
    for step in range(3):
        segment = Segment(np.array([9 + step]), TOKENS[9 + step : 10 + step], cache=drafted, retained=step)
        model.forward(Batch([segment]), layer_plan=skipping)
    assert drafted.written.tolist() == [3, 0, 3, 3]
    for cache in (whole, drafted):
        model.forward(Batch([Segment.chunk(TOKENS[9:13], cache)]))
        cache.keep([0, 1])
    assert same(next_logits(model, drafted), next_logits(model, whole))


def test_costs_say_what_rows_went_through(model: Transformer) -> None:
    cache = prefilled(model, 9)
    segments = [tree(cache, logit_rows=[3]), Segment(np.arange(5), TOKENS[:5])]
    layer_plan = LayerPlan((1, 2, 3), frozenset({"attention.2"}))
    scores = model.forward(Batch(segments), layer_plan=layer_plan)
    config = model.config
    row_bytes = 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    first, second = scores.costs
    assert (first.rows, first.sublayers, first.logits, first.read) == (4, 5, 1, 2 * 13 * row_bytes)
    assert (second.rows, second.sublayers, second.logits, second.read) == (5, 5, 5, 2 * 5 * row_bytes)


def test_routes_that_cannot_be_taken_are_refused() -> None:
    model = tiny_transformer(num_layers=3)
    batch = Batch([Segment(np.arange(2), TOKENS[:2])])
    for layer_plan in (LayerPlan((0, 3)), LayerPlan((1, 0)), LayerPlan((1, 1))):
        with pytest.raises(SettingsError, match="names layers from 0 to 2 in ascending order"):
            model.forward(batch, layer_plan=layer_plan)
    for name in ("attention.3", "mlp", "norm.1", "mlp.-1"):
        with pytest.raises(SettingsError, match=r"can skip attention.0 to mlp.2, not"):
            model.forward(batch, layer_plan=LayerPlan(skip=frozenset({name})))
    theirs = TransformersModel(make_model("llama"))
    assert not theirs.capabilities.layer_plans and model.capabilities.layer_plans
    theirs.forward(batch, layer_plan=WHOLE)
    with pytest.raises(UnsupportedModel, match="always runs all of its layers"):
        theirs.forward(batch, layer_plan=LayerPlan((0,)))
