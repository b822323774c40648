"""Dynamic short convolutions: a pass is the formula row by row along every path, and texts remember as caches must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, DecoderyError, UnsupportedModel
from decodery.logits_sources.prefix_lm import PrefixLM
from decodery.models.batch import Batch, Segment
from decodery.models.config import Mamba, ShortConv
from decodery.models.loaders import fused
from decodery.models.loaders.config_check import check_config
from decodery.models.loaders.description import Description
from decodery.models.torch.attention import rotate
from decodery.models.torch.short_conv import ShortConvolution
from decodery.models.torch.transformer import Transformer
from decodery.testing import check_cache, check_identical, check_state, decode, tiny_transformer
from decodery.training.draft import check_target
from decodery.training.short_conv import parameters, with_short_convolutions
from tiny_models import TREE_PARENTS, tree_mask

KERNEL = 4
IDS = np.random.default_rng(5).integers(0, 64, 25)


def random_filters(model: Transformer, static: bool = True) -> Transformer:
    """The model with convolutions that do something. static: whether filters have a part that is always there."""
    made = with_short_convolutions(model, ShortConv(KERNEL, rank=3))
    chance = torch.Generator().manual_seed(1)
    for layer in made.weights.layers:
        for part in (layer.short_out, *([layer.short_static] if static else [])):
            assert part is not None
            part.copy_(0.4 * torch.randn(part.shape, generator=chance, dtype=part.dtype))
    return made


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_filters(tiny_transformer(0))


def slowly(model: Transformer, ids: np.ndarray) -> torch.Tensor:
    """Logits [n, vocab] of a chain, by the formula of the paper, one row and one output at a time."""
    config, weights = model.config, model.weights
    hidden, n = weights.embedding[torch.from_numpy(ids)], len(ids)
    cos, sin = (each[:, None].double() for each in model.angles(config.rope, np.arange(n)))
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    for layer in weights.layers:
        u = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, config.norm_eps)
        x, width, rank = layer.qkv(u), (heads + 2 * kv_heads) * dim, 3
        assert layer.short_in is not None and layer.short_out is not None and layer.short_static is not None
        parts = np.repeat([0, 1, 2], [heads * dim, kv_heads * dim, kv_heads * dim])
        y = torch.zeros_like(x)
        for t in range(n):
            z = (layer.short_in @ u[t]).view(3, rank)[parts]
            for w in range(min(KERNEL, t + 1)):
                filters = layer.short_out.view(rank, KERNEL, width)[:, w].T
                y[t] += ((z * filters).sum(dim=1) + layer.short_static[w]) * x[t - w]
        turning, values = (x + y).view(n, -1, dim).split((heads + kv_heads, kv_heads), dim=1)
        queries, keys = rotate(turning, cos, sin).split((heads, kv_heads), dim=1)
        shared = heads // kv_heads
        scores = torch.einsum("nhd,mhd->hnm", queries, keys.repeat_interleave(shared, 1)) * config.attention_scale
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        found = torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), values.repeat_interleave(shared, 1))
        hidden = hidden + layer.output(found.flatten(1))
        gate, up = layer.gate_up(model._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        hidden = hidden + layer.down(torch.nn.functional.silu(gate) * up)
    return weights.head(model._norm(hidden, weights.norm))


def test_a_pass_is_the_formula_in_pieces_and_along_every_path_of_a_tree(model: Transformer) -> None:
    wanted = slowly(model, IDS)
    cache, rows = model.new_cache(), []
    for size in (9, 1, 1, 2, 7, 1, 4):
        rows.append(model.forward(Batch([Segment.chunk(IDS[cache.next_position :][:size], cache)])).logits)
        cache.keep(range(size))
    assert (torch.cat(rows) - wanted).abs().max() < 1e-10
    assert (tiny_transformer(0).forward(Batch([Segment(np.arange(25), IDS)])).logits - wanted).abs().max() > 0.1
    mask, nodes = tree_mask(TREE_PARENTS), np.random.default_rng(6).integers(0, 64, len(TREE_PARENTS))
    places = len(IDS) + mask.sum(axis=1) - 1
    logits = model.forward(Batch([Segment(places, nodes, mask=mask, cache=cache)])).logits
    flattened = slowly(model, np.concatenate([IDS, nodes]))[len(IDS) :]
    for node in range(len(nodes)):
        assert (logits[node] - slowly(model, np.concatenate([IDS, nodes[mask[node]]]))[-1]).abs().max() < 1e-10
    # Neighbours in the order of packing are no ancestors.
    assert (logits - flattened).abs().max() > 0.1
    # A tree that grows: rows of the first pass stay, and those of the next one hang below them.
    first, later = 5, len(nodes) - 5
    cache.keep([])
    model.forward(Batch([Segment(places[:first], nodes[:first], mask=mask[:first, :first], cache=cache)]))
    grown = Segment(places[first:], nodes[first:], mask=mask[first:], cache=cache, retained=first)
    assert (model.forward(Batch([grown])).logits - logits[-later:]).abs().max() < 1e-10


def test_every_number_of_accepted_rows_leaves_the_text_behind_it(model: Transformer) -> None:
    for accepted in range(6):
        cache = model.new_cache()
        model.forward(Batch([Segment.chunk(IDS[:7], cache)]))
        cache.keep(range(7))
        model.forward(Batch([Segment.chunk(IDS[7:12], cache)]))
        cache.keep(range(accepted))
        other = np.array([3, 1, 4])
        found = model.forward(Batch([Segment.chunk(other, cache)])).logits
        assert (found - slowly(model, np.concatenate([IDS[: 7 + accepted], other]))[-3:]).abs().max() < 1e-10


def test_texts_remember_as_caches_must_and_drafts_give_the_text_of_plain_decoding(model: Transformer) -> None:
    assert check_cache(model, programs=4, steps=12) < 1e-9
    prompts = [[5, 6, 7, 8] * 4, [9, 10, 9, 10, 9]]
    for drafter in ("prompt-lookup", "token-recycling"):
        check_identical(model, prompts, drafter=drafter, max_new_tokens=16, tested="drafted")
        assert check_state(model, prompts, drafter=drafter, max_new_tokens=8) < 1e-9


def test_convolutions_that_are_not_yet_trained_change_no_bit() -> None:
    plain = tiny_transformer(0, dtype=torch.float32)
    held = [layer.qkv.weight.clone() for layer in plain.weights.layers]  # type: ignore[attr-defined]
    made = with_short_convolutions(plain, ShortConv())
    segment = Segment(np.arange(25), IDS)
    assert torch.equal(made.forward(Batch([segment])).logits, plain.forward(Batch([segment])).logits)
    for layer, weight in zip(plain.weights.layers, held, strict=True):
        assert torch.equal(layer.qkv.weight, weight) and layer.short_in is None  # type: ignore[attr-defined]
    # The static part alone is a convolution too.
    assert not torch.equal(
        random_filters(plain).forward(Batch([segment])).logits, made.forward(Batch([segment])).logits
    )


def test_filters_learn() -> None:
    model = with_short_convolutions(tiny_transformer(0, dtype=torch.float32), ShortConv(KERNEL, 2))
    learned = parameters(model)
    steps = torch.optim.Adam([each.requires_grad_(True) for each in learned.values()], lr=1e-2)
    losses = []
    for _ in range(8):
        logits = model.forward(Batch([Segment(np.arange(25), IDS)])).logits
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(IDS[1:])))
        steps.zero_grad()
        losses[-1].backward()
        steps.step()
    assert losses[-1] < losses[0] - 1.0
    assert all(bool(each.any()) for each in learned.values())


def test_it_is_saved_and_read(model: Transformer, tmp_path: Path) -> None:
    whole = random_filters(tiny_transformer(0, dtype=torch.float32))
    fused.save(tmp_path / "float32.safetensors", whole.weights)
    described = Description(whole.config, "float32", {}, None).text()
    (tmp_path / "model.json").write_text(described)
    config = Description.read(tmp_path / "model.json").config
    assert config == whole.config
    again = Transformer(config, fused.read(tmp_path / "float32.safetensors", config, torch.device("cpu")))
    segment = Segment(np.arange(25), IDS)
    assert torch.equal(again.forward(Batch([segment])).logits, whole.forward(Batch([segment])).logits)
    smaller = replace(config, short_conv=ShortConv(KERNEL, 2))
    with pytest.raises(CorruptFile, match="do not fit"):
        fused.read(tmp_path / "float32.safetensors", smaller, torch.device("cpu"))
    with pytest.raises(CorruptFile, match="do not fit layers"):
        check_config(replace(config, mamba=Mamba(4, 8, 1, 4, 4), state_layers=(True, False)), "config.json")


def test_what_needs_rows_by_themselves_is_refused(model: Transformer) -> None:
    for settings in ({"drafter": "swift"}, {"cache_policy": "h2o"}, {"logits_source": PrefixLM()}):
        with pytest.raises(DecoderyError, match=r"need"):
            decode(model, [[1, 2, 3]], **settings)
    with pytest.raises(UnsupportedModel, match="rows before it"):
        model.heads(0, torch.zeros(1, 32), np.arange(1))
    with pytest.raises(DecoderyError, match="no draft can be cut"):
        check_target(type("Loaded", (), {"model": model, "name": "it"})())
    with pytest.raises(UnsupportedModel, match="floating point"):
        from decodery.testing.models import to_int8

        with_short_convolutions(to_int8(tiny_transformer(0, dtype=torch.float32)), ShortConv())
    assert isinstance(model._convolutions[0], ShortConvolution)
