"""Sites: reading changes no bit, an intervention changes its own rows and nothing else."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.batch import Batch, Segment
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.hooks import HookPoint, Intervention, hook_point
from decodery.models.layer_plan import LayerPlan
from decodery.models.torch.transformer import Transformer
from decodery.models.transformers.adapter import TransformersModel
from open_models import BACKENDS, LAYERS, make, same
from tiny_models import make_model

TOKENS = np.random.default_rng(2).integers(0, 64, 40)
EVERYWHERE = [
    "embed", "resid_pre.1", "head_out.0", "attn_out.1", "mlp_out.2", "resid_post.2", "head_out.3", "attn_out.-1",
    "mlp_out.-1", "resid_post.-1", "final_norm", "logits",
]  # fmt: skip


@pytest.fixture(params=[(backend, gemma) for backend in BACKENDS for gemma in (False, True)], ids=str)
def model(request: pytest.FixtureRequest) -> Transformer:
    backend, gemma = request.param
    return make(backend, gemma=gemma)


def segments(model: Transformer, *interventions: Intervention) -> list[Segment]:
    """A text after a cache, whose rows may be changed, and another one beside it."""
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(TOKENS[:9], cache)]))
    cache.keep(range(9))
    own = Segment.chunk(TOKENS[9:14], cache)
    own.interventions = interventions
    return [Segment(np.arange(6), TOKENS[20:26], logit_rows=[2, 5]), own]


def double(rows: torch.Tensor, _: Segment) -> torch.Tensor:
    return rows * 2


def test_reading_changes_no_bit(model: Transformer) -> None:
    plain = model.forward(Batch(segments(model)))
    read = model.forward(Batch(segments(model)), taps=EVERYWHERE)
    assert torch.equal(plain.logits, read.logits)
    widths = {name: read.hidden[name].shape for name in EVERYWHERE}
    assert widths["head_out.0"] == (11, 32) and widths["final_norm"] == (7, 32) and widths["logits"] == (7, 64)
    assert read.hidden_of(1, "final_norm").shape == (5, 32) and read.hidden_of(0, "mlp_out.2").shape == (6, 32)


def test_what_is_read_adds_up(model: Transformer) -> None:
    taps = [f"{name}.{layer}" for layer in range(LAYERS) for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")]
    scores = model.forward(Batch(segments(model)), taps=[*taps, "embed", "final_norm", 0, -1])
    hidden = scores.hidden
    for layer in range(LAYERS):
        total = hidden[f"resid_pre.{layer}"] + hidden[f"attn_out.{layer}"] + hidden[f"mlp_out.{layer}"]
        assert torch.allclose(total, hidden[f"resid_post.{layer}"], rtol=1e-5, atol=1e-5)
    tokens = torch.from_numpy(np.concatenate((TOKENS[20:26], TOKENS[9:14])))
    assert same(hidden["embed"], model.embed_tokens(tokens)) and same(hidden["embed"], hidden[0])
    assert same(hidden[-1], hidden[f"resid_post.{LAYERS - 1}"])
    wanted = [2, 5, *range(6, 11)]
    assert same(hidden["final_norm"], model.final_norm(hidden[-1][wanted]))
    assert same(scores.logits, model.project(hidden["final_norm"]))
    assert same(scores.logits, model.head(hidden[-1][wanted]))


@pytest.mark.parametrize("place", EVERYWHERE)
def test_an_intervention_changes_its_own_rows_only(model: Transformer, place: str) -> None:
    plain = model.forward(Batch(segments(model)), taps=[place])
    batch = Batch(segments(model, Intervention(place, double)))
    changed = model.forward(batch, taps=[place])
    assert same(changed.of(0), plain.of(0))
    if place != "resid_post.-1":  # the final norm does not see a factor
        assert not same(changed.of(1), plain.of(1))
    # A site that is read shows the rows as they go on.
    if "attn" in place or "mlp" in place or "resid_pre" in place or place in ("embed", "head_out.0"):
        assert same(changed.hidden_of(1, place), plain.hidden_of(1, place) * 2)
    alone = Batch([segments(model, Intervention(place, double))[1]])
    assert same(model.forward(alone).logits, changed.of(1))


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
def test_kernels_change_what_torch_changes(place: str, gemma: bool) -> None:
    found = []
    for backend in ("native", "portable"):
        model = make(backend, gemma=gemma)
        batch = Batch(segments(model, Intervention(place, lambda rows, _: rows.flip(-1) + 0.25)))
        scores = model.forward(batch, taps=EVERYWHERE)
        cache = batch.segments[1].cache
        assert cache is not None
        cache.keep(range(5))
        after = model.forward(Batch([Segment.chunk(TOKENS[30:33], cache)])).logits
        found.append([scores.logits, after, *scores.hidden.values()])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_a_sublayer_that_adds_nothing_is_one_that_is_skipped(model: Transformer) -> None:
    nothing = Intervention("mlp_out.1", lambda rows, _: torch.zeros_like(rows))
    (_, own), skipping = segments(model, nothing), LayerPlan(skip=frozenset({"mlp.1"}))
    expected = model.forward(Batch([segments(model)[1]]), layer_plan=skipping).logits
    assert same(model.forward(Batch([own])).logits, expected)


def test_interventions_at_one_site_follow_each_other(model: Transformer) -> None:
    add = Intervention("resid_pre.2", lambda rows, _: rows + 1)
    twice = Intervention(2, double)
    both = [model.forward(Batch(segments(model, *order))).of(1) for order in ((add, twice), (twice, add))]
    once = Intervention("resid_post.1", lambda rows, _: (rows + 1) * 2)
    assert not same(*both)
    assert same(both[0], model.forward(Batch(segments(model, once))).of(1))


def test_keys_and_values_below_an_intervention_stay(model: Transformer) -> None:
    caches = []
    for interventions in ((), (Intervention("resid_pre.2", double),)):
        batch = Batch(segments(model, *interventions))
        model.forward(batch)
        cache = batch.segments[1].cache
        assert cache is not None
        cache.keep(range(5))
        caches.append(cache)
    equal = [all(map(torch.equal, caches[0].view(layer), caches[1].view(layer))) for layer in range(LAYERS)]
    assert equal == [True, True, False, False]


def test_an_intervention_may_use_the_model(model: Transformer) -> None:
    """The kernels' working memory is the pass's own while it stands at a site."""
    seen = []

    def look(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
        seen.append(model.head(rows).argmax(dim=-1))
        model.forward(Batch([Segment(np.arange(30), TOKENS[:30])]))
        return rows

    batch = segments(model, *(Intervention(f"resid_post.{layer}", look) for layer in range(LAYERS)))
    scores = model.forward(Batch(batch), taps=[1])
    assert same(scores.logits, model.forward(Batch(segments(model))).logits)
    assert len(seen) == LAYERS and torch.equal(seen[-1], scores.of(1).argmax(dim=-1))


def test_an_intervention_that_fails_fails_the_pass_alone(model: Transformer) -> None:
    def fail(rows: torch.Tensor, _: Segment) -> torch.Tensor:
        raise RuntimeError("cannot")

    with pytest.raises(RuntimeError, match="cannot"):
        model.forward(Batch(segments(model, Intervention("attn_out.1", fail))))
    with pytest.raises(SettingsError, match=r"at head_out.1 was given rows \[5, 32\] and returned \[5, 16\]"):
        model.forward(Batch(segments(model, Intervention("head_out.1", lambda rows, _: rows[:, :16]))))
    again = segments(model)
    assert same(model.forward(Batch(again)).logits, model.forward(Batch(segments(model))).logits)


def test_sites_have_names() -> None:
    names = (0, -1, "embed", "resid_pre.-1", "resid_post.0", "attn_out.-4", "logits")
    residual = partial(HookPoint, "residual")
    assert [hook_point(name, 4) for name in names] == [
        residual(0), residual(4), residual(0), residual(3), residual(1),
        HookPoint("attn_out", 0), HookPoint("logits"),
    ]  # fmt: skip
    for name in ("resid_post.4", "head_out", "mlp_out.x", "logits.1", "attn_weights.0", "resid_pre.-5", ""):
        with pytest.raises(SettingsError, match=f"no site '{name}'"):
            hook_point(name, 4)
    model = make("float64")
    batch = Batch([Segment(np.arange(2), TOKENS[:2])])
    for place in ("attn_out.1", "resid_pre.0", "head_out.1"):
        with pytest.raises(SettingsError, match="in a pass that leaves that"):
            model.forward(batch, taps=[place], layer_plan=LayerPlan((1, 2), frozenset({"attention.1"})))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_models_of_transformers_have_the_stream_and_the_logits(name: str) -> None:
    theirs = TransformersModel(make_model(name))
    assert theirs.capabilities.sites == {"residual", "logits"}
    plain = Batch([Segment(np.arange(6), TOKENS[:6]), Segment(np.arange(4), TOKENS[6:10])])
    expected = theirs.forward(plain, taps=("embed", 2, "logits"))
    assert torch.equal(expected.hidden_of(1, "logits"), expected.of(1))
    tokens = torch.from_numpy(TOKENS[:6])
    assert torch.equal(expected.hidden_of(0, "embed"), theirs.hf_model.get_input_embeddings()(tokens))
    for place in ("embed", 2, "logits"):
        own = Segment(np.arange(6), TOKENS[:6], interventions=(Intervention(place, double),))
        changed = theirs.forward(Batch([own, plain.segments[1]]), taps=(place,))
        assert torch.equal(changed.hidden_of(0, place), expected.hidden_of(0, place) * 2)
        assert torch.equal(changed.of(1), expected.of(1)) and not torch.equal(changed.of(0), expected.of(0))
    with pytest.raises(UnsupportedModel, match="has no sites but logits and residual"):
        theirs.forward(plain, taps=("head_out.1",))


@pytest.mark.usefixtures("pools_of_pytorch")
def test_passes_of_a_fixed_shape_leave_sites_to_the_others() -> None:
    model = make("float64")
    model.static = StaticPasses()
    with torch.no_grad():
        expected = [model.forward(Batch(segments(model, *each))).logits for each in ((), (Intervention(2, double),))]
    assert model.static.shapes
    model.static = None
    found = [model.forward(Batch(segments(model, *each))).logits for each in ((), (Intervention(2, double),))]
    assert same(expected[0], found[0]) and same(expected[1], found[1]) and not same(found[0], found[1])
