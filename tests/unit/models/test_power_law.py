"""PLDR-LLM: operators are the formula, kept ones make a causal model, and what would not be the same is not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import decodery as dc
from decodery.core.errors import DecoderyError
from decodery.engine.engine import Engine
from decodery.engine.request import Request
from decodery.models.batch import Batch, Segment
from decodery.models.torch.power_law import OperatorNets, PowerLaw, side_by_side, with_operators
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights
from decodery.sampling.sampler import Sampler
from decodery.speculative.drafters.draft_model import DraftModel
from decodery.step.draft_tree import DraftTree
from decodery.testing import tiny_transformer, to_int8
from decodery_benchmarks.puzzles import puzzle
from decodery_benchmarks.training.pldr import PLDRRecipe, random_power_law, train_pldr

RECIPE = PLDRRecipe(heads=2, head_dim=8, layers=2, inner=24, operator_inner=12, context=64, seed=5)
TOKENS = [3, 40, 7, 12, 21, 5, 9, 30, 2, 2, 17]


@cache
def power_law() -> PowerLaw:
    """In float64, with operators that are far from the identity."""
    law = random_power_law(RECIPE)

    def wide(value: object) -> object:
        if isinstance(value, Dense):
            return Dense(3 * value.weight.double(), None if value.bias is None else value.bias.double())
        return value.double() if isinstance(value, torch.Tensor) else value

    weights = law.model.weights
    layers = [Layer(**{name: wide(part) for name, part in vars(each).items()}) for each in weights.layers]
    head = Dense(40 * weights.embedding.double())
    model = Transformer(law.model.config, Weights(weights.embedding.double(), layers, weights.norm.double(), head))
    chance = torch.Generator().manual_seed(1)
    tensors = {
        name: each.double() + 0.3 * torch.randn(each.shape, generator=chance, dtype=torch.float64)
        for name, each in law.nets.tensors.items()
    }
    return PowerLaw(model, OperatorNets(tensors, law.nets.units, law.nets.depth))


@cache
def kept() -> Transformer:
    law = power_law()
    return law.frozen(law.operators(TOKENS))


def test_operators_are_the_formula() -> None:
    """Number by number, of one layer."""
    nets, heads, dim = power_law().nets, RECIPE.heads, RECIPE.head_dim
    queries = torch.randn(1, heads, 5, dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = nets.operators(1, queries)[0]
    part = {name[2:]: each.numpy() for name, each in nets.tensors.items() if name.startswith("1.")}

    def normed(row: np.ndarray, norm: np.ndarray) -> np.ndarray:
        centred = row - row.mean()
        return np.asarray(centred / np.sqrt((centred**2).mean() + 1e-6) * norm[:dim] + norm[dim:])

    def silu(x: np.ndarray) -> np.ndarray:
        return np.asarray(x / (1 + np.exp(-x)))

    for head in range(heads):
        q = queries[0, head].numpy()
        rows = [normed(sum(q[t, i] * q[t] for t in range(5)), part["density"]) for i in range(dim)]
        for unit in range(RECIPE.units):
            for i, row in enumerate(rows):
                seen = row
                for depth in range(RECIPE.depth):
                    at = f"{unit}.{depth}."
                    both = part[at + "gate_up"] @ seen + part[at + "gate_up_bias"]
                    seen = part[at + "down"] @ (silu(both[:12]) * both[12:]) + part[at + "down_bias"]
                rows[i] = normed(seen + row, part[f"{unit}.norm"])
        turned = part["weight"][head] @ np.stack(rows) + part["bias"][head]
        positive = turned * silu(turned) + 1e-9
        wanted = part["coupling"][head] @ positive ** part["power"][head] + part["offset"][head]
        assert np.abs(found[head].numpy() - wanted).max() < 1e-9 * max(1.0, np.abs(wanted).max())


def test_kept_operators_make_a_causal_model_and_made_ones_do_not() -> None:
    law, model, tokens = power_law(), kept(), torch.tensor([TOKENS])
    whole, _ = law.predicted(tokens)
    frozen = side_by_side(model, tokens)[0]
    # Read whole, the text from which the operators come is the same with them kept.
    assert (whole[0] - frozen).abs().max() < 1e-9
    pieces = []
    cache = model.new_cache()
    for piece in (TOKENS[:3], TOKENS[3:4], TOKENS[4:]):
        pieces.append(model.forward(Batch([Segment.chunk(piece, cache, logit_rows=range(len(piece)))])).logits)
        cache.keep(range(len(piece)))
    assert (torch.cat(pieces) - frozen).abs().max() < 1e-9
    # Made anew of a shorter text, they are others: rows in the middle hang on what comes later.
    assert (law.predicted(tokens[:, :6])[0][0, :6] - frozen[:6]).abs().max() > 1e-3


def test_keys_may_be_turned_in_place_of_queries_but_not_projections() -> None:
    """q G k = q (G k), before which rotation stands: G folded into the projection is another model."""
    model, law = kept(), power_law()
    config, heads, dim = model.config, RECIPE.heads, RECIPE.head_dim
    plain = law.model
    layer, operator = plain.weights.layers[0], model.weights.layers[0].operator
    assert operator is not None
    positions = np.arange(6)
    cos, sin = (each[:, None].double() for each in plain.angles(config.rope, positions))
    normed = torch.randn(6, config.hidden_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    queries, keys, _ = plain._heads(layer, normed, cos, sin)
    turned, same, _ = model._heads(model.weights.layers[0], normed, cos, sin)
    scores = torch.einsum("ihd,jhd->hij", turned, same)
    stored = torch.einsum("hde,jhe->jhd", operator, keys)
    assert (torch.einsum("ihd,jhd->hij", queries, stored) - scores).abs().max() < 1e-9
    assert isinstance(layer.qkv, Dense) and layer.qkv.bias is not None
    folded = layer.qkv.weight.clone()
    folded[: heads * dim] = torch.einsum("hde,hdn->hen", operator, folded[: heads * dim].view(heads, dim, -1)).flatten(
        0, 1
    )
    wrong, _, _ = plain._heads(Layer(**{**vars(layer), "qkv": Dense(folded, layer.qkv.bias)}), normed, cos, sin)
    assert (torch.einsum("ihd,jhd->hij", wrong, keys) - scores).abs().max() > 1e-2


def test_identities_are_ordinary_attention_for_any_family() -> None:
    for model in (tiny_transformer(3), power_law().model):
        config = model.config
        eye = torch.eye(config.head_dim, dtype=torch.float64).expand(config.num_layers, config.num_heads, -1, -1)
        tokens = np.asarray(TOKENS)
        segment = [Segment(np.arange(len(tokens)), tokens)]
        same = with_operators(model, eye).forward(Batch(segment)).logits
        assert (same - model.forward(Batch(segment)).logits).abs().max() < 1e-9
        other = with_operators(model, 2 * eye).forward(Batch(segment)).logits
        assert (same - other).abs().max() > 1e-3


def test_trees_and_drafts_behind_kept_operators() -> None:
    model = kept()
    tree = DraftTree(tokens=np.array([5, 6, 7, 8]), parents=np.array([-1, 0, 0, 2]))
    cache = model.new_cache()
    model.forward(Batch([Segment.chunk(TOKENS, cache)]))
    cache.keep(range(len(TOKENS)))
    rows = Segment(len(TOKENS) + tree.depths, tree.tokens, mask=tree.ancestor_mask(), cache=cache)
    found = model.forward(Batch([rows])).logits
    path = np.asarray([*TOKENS, 5, 7, 8])
    alone = model.forward(Batch([Segment(np.arange(len(path)), path)])).logits[-3:]
    assert (found[[0, 2, 3]] - alone).abs().max() < 1e-9
    drafted = power_law().frozen(power_law().operators(TOKENS[:4]))
    texts, sampler = [], Sampler.from_settings(temperature=1.0)
    for drafter in (None, DraftModel(drafted, length=3)):
        engine = Engine(model)
        seq = engine.submit(Request(TOKENS, max_new_tokens=20, drafter=drafter, sampler=sampler, seed=3))
        engine.run([seq])
        texts.append(seq.generated)
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


def test_a_model_is_trained_saved_and_read_again(tmp_path: Path) -> None:
    recipe = PLDRRecipe(heads=2, head_dim=8, layers=1, inner=16, operator_inner=8, steps=3, batch=2, every=2, held=2)
    kind = puzzle("chain")
    found = train_pldr(kind, tmp_path, recipe=recipe)
    assert train_pldr(kind, tmp_path, recipe=recipe) == found
    law, loaded = PowerLaw.load(tmp_path), dc.load(tmp_path, dtype="float32").model
    assert isinstance(loaded, Transformer) and loaded.config.operators and not law.model.config.operators
    tokens = torch.tensor([TOKENS])
    own = law.operators(TOKENS)
    assert (law.predicted(tokens)[0] - side_by_side(law.frozen(own), tokens)).abs().max() < 1e-4
    operator = loaded.weights.layers[0].operator
    assert operator is not None and operator.shape == own[0].shape
    for wrong in (
        lambda: with_operators(loaded, own[:, :1]),
        lambda: with_operators(to_int8(tiny_transformer(0, dtype=torch.float32)), own),
        lambda: law.operators([]),
        lambda: PowerLaw.load(tmp_path / "training"),
        lambda: PLDRRecipe(head_dim=7),
    ):
        with pytest.raises(DecoderyError):
            wrong()
