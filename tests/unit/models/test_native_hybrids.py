"""Layers that mix rows in place of attention, in the native pass: bits, trees, states, and the layers in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.core.native.kernels import choose, kernel_sets
from decodery.models.batch import Batch, Segment
from decodery.models.config import GatedDelta, Mamba, ModelConfig, Selective
from decodery.models.loaders.config_check import check_config
from decodery.models.native.stack import NativeStack
from decodery.models.native.super_blocks import SuperBlockLinear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import check_cache, check_identical
from drawn_models import PARENTS, after, made, tree_logits
from tiny_gguf import Kind, as_linear, random_blocks

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 24, "max_positions": 512,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    # Widths that fill neither vectors nor the last layer of slots.
    "gated delta": {
        "delta": GatedDelta(heads=4, head_dim=20, groups=2, state=12, kernel=3), "gated_attention": True,
        "qk_norm": True, "state_layers": (True, False, True),
    },
    "mamba": {
        "mamba": Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4), "residual_scale": 0.5,
        "state_layers": (True, True, False),
    },
    "gated convolution": {"gated_conv": 3, "conv_layers": (True, False, True)},
    "mamba beside attention": {
        "mamba": Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4), "residual_scale": 0.5,
        "state_layers": (True,) * 3, "attending_layers": (True,) * 3,
    },
    "a mixer or an MLP, without gates": {
        "mamba": Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4), "gated": False, "activation": "relu2",
        "num_layers": 4, "state_layers": (True, False, False, True), "mixing_layers": (True, False, True, True),
        "mlp_layers": (False, True, False, False),
    },
    "channels that decay apart": {
        "selective": Selective(70, 1, 1, 12, 4, rank=5, step_eps=1e-4, weighted=True), "residual_scale": 0.5,
        "state_layers": (True, False, True),
    },
    "channels without norms": {
        "selective": Selective(72, 1, 1, 20, 3, rank=3), "intermediate_size": 0, "state_layers": (True, True, True),
    },
    "mamba without MLPs": {
        "mamba": Mamba(heads=4, head_dim=16, groups=1, state=16, kernel=4), "intermediate_size": 0,
        "state_layers": (True, True, True),
    },
}  # fmt: skip


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return made(ModelConfig(**SIZES | SHAPES[request.param]))


def test_rows_have_the_same_bits_in_every_tree_chunk_batch_and_kernel_set(model: Transformer) -> None:
    assert isinstance(model._stack, NativeStack) and model.capabilities.exact_rows
    tokens = [11 * node % 90 for node in range(len(PARENTS))]
    whole = []
    for name in kernel_sets():
        choose(name)
        # Content of more rows than are mixed at once, and of fewer.
        whole.append(tree_logits(model, after(model, 150), PARENTS, tokens))
    choose(kernel_sets()[0])
    assert all(torch.equal(each, whole[0]) for each in whole)
    cut = after(model, 1, 80, 2, 67)
    assert torch.equal(tree_logits(model, cut, PARENTS, tokens), whole[0])
    # As states are known now, and of a text that shares the pass with others.
    assert torch.equal(tree_logits(model, cut, PARENTS, tokens), whole[0])
    path = [0, 2, 5, 6]
    chain = tree_logits(model, cut, [-1, 0, 1, 2], [tokens[node] for node in path])
    assert torch.equal(chain, whole[0][path])
    other = Segment(np.arange(4), tokens=np.arange(4))
    alone = model.forward(Batch([other])).logits
    ours = [Segment(np.array([150]), tokens=np.array(tokens[:1]), cache=cut), Segment.chunk(np.arange(5), after(model))]
    together = model.forward(Batch([other, *ours])).logits
    assert torch.equal(together[:4], alone) and torch.equal(together[4], whole[0][0])
    # The order of packing is no path.
    assert not torch.equal(tree_logits(model, cut.fork(), [-1, 0, 1, 2, 3, 4, 5, 6], tokens)[-1], whole[0][-1])


def test_states_lag_behind_the_rows_of_plain_decoding_and_logits_do_not(model: Transformer) -> None:
    ids, cache, known = np.arange(3, 40) % 90, model.new_cache(), set()
    whole = model.forward(Batch([Segment.chunk(ids, model.new_cache())])).logits
    for at, token in enumerate(ids):
        row = model.forward(Batch([Segment.chunk([token], cache)])).logits
        assert torch.equal(row[0], whole[at])
        cache.keep([0])
        found = [each[-1][0] for each in cache.states.known.values()]
        assert all(at - 3 < length <= at + 1 for length in found)
        known.update(found)
    # Mamba-1's are brought up to date after each row, as its scan takes longer than writing them.
    assert len(known) == (0 if model.config.gated_conv else 37 if model.config.selective else 9)


@pytest.mark.parametrize("kept", [range(20), range(19), [0, 2, 3], []])
def test_states_after_a_prompt_are_known_where_all_its_rows_are_kept(model: Transformer, kept: list[int]) -> None:
    ids, more, cache = np.arange(5, 25), np.array([7, 30]), after(model, 9)
    model.forward(Batch([Segment.chunk(ids, cache, logit_rows=[19])]))
    pending, fork = cache.states.tentative, cache.fork()
    cache.keep(kept)
    whole, stateless = len(kept) == 20, bool(model.config.gated_conv)
    assert (pending is None) == stateless and cache.states.tentative is None and fork.states.tentative is None
    assert [each[-1][0] for each in cache.states.known.values()] == ([29] if whole and not stateless else [])
    anew = after(model, 9)
    if len(kept):
        model.forward(Batch([Segment.chunk(ids[list(kept)], anew)]))
        anew.keep(range(len(kept)))
    if list(kept) != [0, 2, 3]:
        # Rows that follow others than those that they were read after are not theirs.
        assert torch.equal(*(model.forward(Batch([Segment.chunk(more, each)])).logits for each in (cache, anew)))
        cache.keep([])
    if pending is not None and not whole:
        # What would be read of states that count on rows that are gone.
        right = model.forward(Batch([Segment.chunk(more, cache)])).logits
        cache.keep([])
        cache.states.add(pending[0], int(cache.lengths[0]), pending[2])
        assert not torch.equal(model.forward(Batch([Segment.chunk(more, cache)])).logits, right)


def test_the_native_pass_finds_what_layers_in_pytorch_find(model: Transformer) -> None:
    tokens = [13 * node % 90 for node in range(len(PARENTS))]
    ours = tree_logits(model, after(model, 70), PARENTS, tokens)
    chained = tree_logits(model, after(model, 70), [-1, *range(7)], tokens)
    model._stack = None
    theirs = tree_logits(model, after(model, 70), PARENTS, tokens)
    # Inputs are rounded to bytes in both: one in a hundred goes another way.
    scale = float(theirs.abs().max())
    assert (ours - theirs).abs().max() < 0.02 * scale < 0.2 * float((chained - theirs)[-1].abs().max())


@pytest.mark.parametrize("form", ["Q4_K", "BF16"])
def test_layers_project_by_matrices_of_several_forms(form: str) -> None:
    config = ModelConfig(
        vocab_size=90, hidden_size=256, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        max_positions=64, delta=GatedDelta(heads=2, head_dim=16, groups=1, state=16, kernel=2), gated_attention=True,
        state_layers=(True, False),
    )  # fmt: skip
    model, rng = made(config), np.random.default_rng(2)
    for layer, name in ((0, "steps"), (1, "out_gate")):
        outputs, _ = getattr(model.weights.layers[layer], name).shape
        dense = Dense(torch.from_numpy(rng.normal(size=(outputs, 256))).to(torch.bfloat16) * 0.1)
        other = dense if form == "BF16" else as_linear(form, random_blocks(Kind.Q4_K, outputs, 1))
        if isinstance(other, SuperBlockLinear):
            other.scales *= 0.001
        setattr(model.weights.layers[layer], name, other)
    model = Transformer(config, model.weights)
    assert isinstance(model._stack, NativeStack)
    ours = tree_logits(model, after(model, 9), PARENTS, list(range(8)))
    model._stack = None
    theirs = tree_logits(model, after(model, 9), PARENTS, list(range(8)))
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


def test_a_text_without_rows_shares_a_pass(model: Transformer) -> None:
    none, some = np.zeros(0, dtype=np.int64), Segment(np.arange(4), tokens=np.arange(4))
    alone = model.forward(Batch([some])).logits
    for cache in (None, after(model, 3)):
        assert torch.equal(model.forward(Batch([some, Segment(none, tokens=none, cache=cache)])).logits, alone)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (SHAPES["gated delta"] | {"gated_conv": 3, "conv_layers": (False, True, False)}, "of one kind"),
        (SHAPES["gated delta"] | {"mamba": SHAPES["mamba"]["mamba"]}, "of one kind"),
        ({"selective": Selective(12, 2, 1, 8, 4), "state_layers": (True,) * 3}, "channels of 2 numbers"),
        (SHAPES["mamba"] | {"sliding_window": 4, "sliding_layers": (True, False, False)}, "those that attend"),
        (SHAPES["gated convolution"] | {"sliding_window": 4, "sliding_layers": (False, False, True)}, "that attend"),
        ({"inners": (8, 16, 8)}, "shapes or inputs of their own"),
        ({"head_shapes": ((2, 24), (1, 8), (2, 24))}, "shapes or inputs of their own"),
    ],
)
def test_layers_that_kernels_would_take_for_others_are_refused(changes: dict[str, Any], said: str) -> None:
    fits = {"sliding_layers": (False,) * 3} | changes
    with pytest.raises(CorruptFile, match=said):
        check_config(ModelConfig(**SIZES | fits), "a file")


def test_texts_are_remembered_to_the_bit_and_drafts_change_nothing(model: Transformer) -> None:
    assert check_cache(model, programs=2, steps=10) == 0.0
    check_identical(model, [[5, 6, 7, 8] * 4], drafter="ngram", max_new_tokens=8, tested="drafted")
    with pytest.raises(SettingsError, match="keeps states of its rows"):
        model.narrow_caches(torch.float16)
