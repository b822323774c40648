"""Experts in the native pass: bits, the layers in PyTorch, matrices of every form, and what is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from decodery.core.native.kernels import choose, kernel_sets, library, threads_at_most
from decodery.diffusion.experts.des_vote import DESVote
from decodery.models.batch import Batch, Segment
from decodery.models.config import CLAMPED, GatedDelta, Latent, ModelConfig
from decodery.models.layer_plan import LayerPlan
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.floats import Float4Linear, MXFP4Linear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.stack import NativeStack
from decodery.models.native.super_blocks import SuperBlockLinear
from decodery.models.torch.portable import PortableStack
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import check_cache, check_identical
from drawn_models import PARENTS, after, made, tree_logits
from tiny_gguf import Kind, as_linear, random_blocks
from tiny_models import doubled

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 72, "intermediate_size": 40, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 24, "max_positions": 512, "experts": 7, "experts_per_token": 3,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "softmax": {"normed_experts": False, "experts_scale": 1.5},
    "in groups": {
        "sigmoid_router": True, "choice_bias": True, "experts": 8, "expert_groups": 4, "taken_groups": 2,
        "dense_layers": (True, False, False), "dense_inner": 88, "shared_inner": 24, "residual_scale": 0.7,
    },
    "clamped": {"activation": CLAMPED, "router_bias": True, "expert_bias": True, "sinks": True},
    "scaled inputs": {"scaled_inputs": True, "sigmoid_router": True, "normed_experts": False, "shared_inner": 56},
    "gated delta": {
        "delta": GatedDelta(heads=4, head_dim=20, groups=2, state=12, kernel=3), "gated_attention": True,
        "qk_norm": True, "state_layers": (True, False, True), "shared_inner": 24, "shared_gate": True,
    },
    "gated convolution": {"gated_conv": 3, "conv_layers": (True, False, True), "dense_layers": (False, False, True),
                          "dense_inner": 64},
    "without gates": {
        "gated": False, "activation": "relu2", "shared_inner": 24, "sigmoid_router": True, "choice_bias": True,
    },
    "latents": {"latent": Latent(rank=18, turned=6, plain=11, value=13), "num_kv_heads": 1},
    "latents, queries in two steps": {
        "latent": Latent(rank=26, turned=6, plain=12, value=35, queries=30), "num_kv_heads": 1, "head_dim": 32,
        "dense_layers": (True, False, False), "dense_inner": 88,
    },
}  # fmt: skip
TOKENS = [11 * node % 90 for node in range(len(PARENTS))]


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return made(ModelConfig(**SIZES | SHAPES[request.param]))


@pytest.fixture
def two_threads() -> Iterator[None]:
    lib = library()
    assert lib is not None
    lib.decodery_threads(2)
    yield
    lib.decodery_threads(torch.get_num_threads())


def test_rows_have_the_same_bits_in_every_tree_chunk_batch_and_kernel_set(model: Transformer) -> None:
    assert isinstance(model._stack, NativeStack) and model.capabilities.exact_rows
    whole = []
    for name in kernel_sets():
        choose(name)
        # Of a chunk so long some experts have many rows.
        whole.append(tree_logits(model, after(model, 120), PARENTS, TOKENS))
    choose(kernel_sets()[0])
    assert all(torch.equal(each, whole[0]) for each in whole)
    cut = after(model, 1, 30, 2, 87)
    assert torch.equal(tree_logits(model, cut, PARENTS, TOKENS), whole[0])
    path = [0, 2, 5, 6]
    assert torch.equal(tree_logits(model, cut, [-1, 0, 1, 2], [TOKENS[node] for node in path]), whole[0][path])
    other = Segment(np.arange(4), tokens=np.arange(4))
    alone = model.forward(Batch([other])).logits
    together = model.forward(Batch([other, Segment(np.array([120]), tokens=np.array(TOKENS[:1]), cache=cut)])).logits
    assert torch.equal(together[:4], alone) and torch.equal(together[4], whole[0][0])


def test_threads_change_no_bit(model: Transformer, two_threads: None) -> None:
    shared = tree_logits(model, after(model, 40), PARENTS, TOKENS)
    library().decodery_threads(1)  # type: ignore[union-attr]
    assert torch.equal(tree_logits(model, after(model, 40), PARENTS, TOKENS), shared)


def test_the_native_pass_finds_what_layers_in_pytorch_find(model: Transformer) -> None:
    taps = ("attn_out.1", "mlp_out.2", "resid_post.0")
    ids = Segment(np.arange(20), tokens=np.arange(20) * 5 % 90)
    with mock.patch("decodery.models.torch.transformer.runs_natively", lambda config: False):
        alone = Transformer(model.config, model.weights)
    ours, theirs = (each.forward(Batch([ids]), taps=taps) for each in (model, alone))
    assert [cost.experts for cost in ours.costs] == [cost.experts for cost in theirs.costs]
    if isinstance(alone._stack, PortableStack):
        assert torch.equal(ours.logits, theirs.logits)
        assert all(torch.equal(ours.hidden[tap], theirs.hidden[tap]) for tap in taps)
    # Inputs are rounded to bytes in both: one in a hundred goes another way.
    assert (ours.logits - theirs.logits).abs().max() < 0.02 * theirs.logits.abs().max()
    wrong = Transformer(replace(model.config, experts_scale=1.2 * model.config.experts_scale), model.weights)
    assert (wrong.forward(Batch([ids])).logits - theirs.logits).abs().max() > 0.02 * theirs.logits.abs().max()


def float4(shape: tuple[int, ...], rng: torch.Generator) -> Float4Linear:
    outputs, inputs = shape
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=rng, dtype=torch.uint8)
    halves = torch.full((outputs, inputs // 16), 0.015, dtype=torch.float16)
    return Float4Linear(codes, halves, torch.ones(outputs))


def mxfp4(shape: tuple[int, ...], rng: torch.Generator) -> MXFP4Linear:
    outputs, inputs = shape
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=rng, dtype=torch.uint8)
    exponents = torch.randint(120, 123, (outputs, inputs // 32), generator=rng, dtype=torch.uint8)
    return MXFP4Linear(codes, exponents)


def super4(shape: tuple[int, ...], rng: torch.Generator) -> SuperBlockLinear:
    linear = as_linear("Q4_K", random_blocks(Kind.Q4_K, shape[0], shape[1] // 256))
    assert isinstance(linear, SuperBlockLinear)
    linear.scales *= 0.001
    return linear


def drawn(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return 0.1 * torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")


FORMS: dict[str, Callable[[tuple[int, ...], torch.Generator], Any]] = {
    "int4": lambda shape, rng: Int4Linear.quantize(drawn(shape, rng)),
    "5 bits": lambda shape, rng: BlockLinear.quantize(drawn(shape, rng), bits=5),
    "nvfp4": float4,
    "mxfp4": mxfp4,
    "Q4_K": super4,
    "bfloat16": lambda shape, rng: Dense(drawn(shape, rng).bfloat16()),
}


@pytest.mark.parametrize("form", FORMS)
def test_experts_of_every_form_are_read_in_place(form: str, two_threads: None) -> None:
    wide = {
        "hidden_size": 256, "intermediate_size": 256, "num_layers": 2, "shared_inner": 256, "head_dim": 64,
    }  # fmt: skip
    floating = form == "bfloat16"
    model = made(ModelConfig(**SIZES | wide), FORMS[form], torch.bfloat16 if floating else torch.float32)
    assert isinstance(model._stack, NativeStack)
    ours = tree_logits(model, after(model, 9), PARENTS, TOKENS)
    library().decodery_threads(1)  # type: ignore[union-attr]
    assert torch.equal(tree_logits(model, after(model, 4, 5), PARENTS, TOKENS), ours)
    for name in kernel_sets():
        choose(name)
        assert torch.equal(tree_logits(model, after(model, 9), PARENTS, TOKENS), ours)
    choose(kernel_sets()[0])
    if floating:
        model = doubled(model)
    else:
        model._stack = PortableStack(model.config, model.weights, model.angles)
    theirs = tree_logits(model, after(model, 9), PARENTS, TOKENS)
    assert torch.equal(ours, theirs) or (floating and (ours - theirs).abs().max() < 1e-4 * theirs.abs().max())


def test_threads_that_take_experts_first_at_the_same_time_read_whole_ones() -> None:
    config = ModelConfig(**SIZES | {"experts": 32, "experts_per_token": 4})
    ids = [np.arange(12) * step % 90 for step in (1, 7, 11, 13)]
    alone = made(config)
    wanted = [alone.forward(Batch([Segment(np.arange(12), tokens=each)])).logits for each in ids]
    for _ in range(5):
        model, found = made(config), dict[int, torch.Tensor]()

        def read(number: int, model: Transformer = model, found: dict[int, torch.Tensor] = found) -> None:
            with threads_at_most(1):
                found[number] = model.forward(Batch([Segment(np.arange(12), tokens=ids[number])])).logits

        threads = [Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[number], each) for number, each in enumerate(wanted))


def test_texts_are_remembered_to_the_bit_and_drafts_change_nothing(model: Transformer) -> None:
    assert check_cache(model, programs=1, steps=8) == 0.0
    check_identical(model, [[5, 6, 7, 8] * 4], drafter="ngram", max_new_tokens=6, tested="drafted")


def test_rows_of_a_text_may_share_experts(model: Transformer) -> None:
    rows = Segment(np.arange(6), tokens=np.arange(6) * 5 % 90)
    other = Segment(np.arange(2), tokens=np.arange(2))
    free = model.forward(Batch([rows, other]))
    few = model.forward(Batch([rows, other]), layer_plan=LayerPlan(experts=DESVote(0.01)))
    mixing = sum(model.config.mixes(layer) for layer in range(3))
    assert mixing * model.config.experts_per_token <= few.costs[0].experts < free.costs[0].experts
    all_of_them = model.forward(Batch([rows, other]), layer_plan=LayerPlan(experts=DESVote(1.0)))
    assert torch.equal(all_of_them.logits, free.logits) and not torch.equal(few.logits, free.logits)
