"""Layers that stay packed on a device stand for the weights of the CPU's, and kernels multiply by them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from card_kernels import machine_code
from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import Form
from decodery.models.batch import Batch, Segment
from decodery.models.config import CLAMPED, GatedDelta, Mamba, ModelConfig, Selective
from decodery.models.footprint import precision, weight_bytes
from decodery.models.native.block_linear import BlockLinear
from decodery.models.native.floats import Float4Linear, Float8Linear, MXFP4Linear, NF4Linear
from decodery.models.native.int4 import Int4Linear
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.packed import BITS, SUPER_BYTES
from decodery.models.native.reordered import ReorderedLinear
from decodery.models.native.super_blocks import SuperBlockLinear, has_least
from decodery.models.native.ternary import TernaryLinear
from decodery.models.torch import packed_linear as of_device
from decodery.models.torch.mixture import rows_of
from decodery.models.torch.packed_cut import some_inputs
from decodery.models.torch.packed_linear import PackedLinear, packed_linear, packed_weights, packs
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Weights, floating
from decodery.testing import check_identical, tiny_transformer, to_int8
from drawn_models import PARENTS, after, tree_logits
from drawn_models import made as drawn
from far import Devices, FarTensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not CUDA:
    # As tests/conftest.py says, for the GPU kit, which collects this file alone.
    os.environ["TRITON_INTERPRET"] = "1"

pytestmark = [pytest.mark.cuda] if CUDA else []

MIXED: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 24, "max_positions": 512, "experts": 7, "experts_per_token": 3,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"normed_experts": False, "experts_scale": 1.5},
    "in groups": {
        "sigmoid_router": True, "choice_bias": True, "experts": 8, "expert_groups": 4, "taken_groups": 2,
        "dense_layers": (True, False), "dense_inner": 96, "shared_inner": 32,
    },
    "clamped": {"activation": CLAMPED, "router_bias": True, "expert_bias": True, "sinks": True},
    "without gates": {"gated": False, "activation": "relu2", "shared_inner": 32, "sigmoid_router": True},
}  # fmt: skip

HYBRIDS: dict[str, dict[str, Any]] = {
    "gated delta": {
        "delta": GatedDelta(heads=4, head_dim=20, groups=2, state=12, kernel=3), "gated_attention": True,
        "qk_norm": True, "state_layers": (True, False), "experts": 0,
    },
    "mamba beside attention": {
        "mamba": Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4), "state_layers": (True, True),
        "attending_layers": (True, True), "experts": 0,
    },
    "mamba and experts": {
        "mamba": Mamba(heads=4, head_dim=18, groups=2, state=12, kernel=4), "state_layers": (True, False),
    },
    "channels that decay apart": {
        "selective": Selective(70, 1, 1, 12, 4, rank=5, step_eps=1e-4, weighted=True), "state_layers": (True, False),
        "experts": 0,
    },
    "gated convolution": {"gated_conv": 3, "conv_layers": (True, False), "experts": 0},
}  # fmt: skip

Make = Callable[[np.random.Generator, int, int], Any]


def codes(random: np.random.Generator, *shape: int, most: int = 256) -> torch.Tensor:
    return torch.from_numpy(random.integers(0, most, shape).astype(np.uint8))


def halves(random: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.normal(0, 0.02, shape)).half()


def super_blocks(form: Form) -> Make:
    def make(random: np.random.Generator, outputs: int, inputs: int) -> SuperBlockLinear:
        least = has_least(form)
        integers = codes(random, outputs, inputs // 32, 2, most=64 if least else 256)
        return SuperBlockLinear(
            form,
            codes(random, outputs, inputs * BITS[form] // 8),
            halves(random, outputs, inputs // 256, 1 + least),
            integers if least else integers.view(torch.int8),
        )

    return make


def blocks(bits: int) -> Make:
    return lambda random, outputs, inputs: BlockLinear(
        codes(random, outputs, inputs * bits // 8), halves(random, outputs, inputs // 32, 1 if bits == 8 else 2)
    )


def fours(random: np.random.Generator, outputs: int, inputs: int) -> Int4Linear:
    steps = (halves(random, outputs, inputs // 32) for _ in range(2))
    return Int4Linear(codes(random, outputs, inputs // 2), *steps)


def eights(random: np.random.Generator, outputs: int, inputs: int) -> Int8Linear:
    weight = codes(random, outputs, inputs).view(torch.int8)
    return Int8Linear(weight, halves(random, outputs).float(), halves(random, outputs).float())


def float_eights(random: np.random.Generator, outputs: int, inputs: int) -> Float8Linear:
    weight = torch.from_numpy(random.normal(0, 30, (outputs, inputs))).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8Linear(weight, halves(random, outputs, -(-inputs // 128)).float())


LAYERS: dict[str, tuple[Make, int]] = {
    "int4": (fours, 32),
    "int4, act-order": (
        lambda random, outputs, inputs: ReorderedLinear(
            fours(random, outputs, inputs), torch.from_numpy(random.permutation(inputs).astype(np.int32))
        ),
        32,
    ),
    "int8": (eights, 8),
    "FP8": (float_eights, 8),
    "MXFP4": (
        lambda random, outputs, inputs: MXFP4Linear(
            codes(random, outputs, inputs // 2),
            torch.from_numpy(random.integers(110, 135, (outputs, inputs // 32)).astype(np.uint8)),
            halves(random, outputs).float(),
        ),
        32,
    ),
    "NVFP4": (
        lambda random, outputs, inputs: Float4Linear(
            codes(random, outputs, inputs // 2),
            halves(random, outputs, inputs // 16),
            halves(random, outputs).float(),
            halves(random, outputs).float(),
        ),
        32,
    ),
    "NF4": (
        lambda random, outputs, inputs: NF4Linear(
            codes(random, outputs, inputs // 2), halves(random, outputs, -(-inputs // 64)).float()
        ),
        32,
    ),
    **{f"blocks of {bits} bits": (blocks(bits), 32) for bits in (4, 5, 6, 8)},
    **{form.name: (super_blocks(form), 256) for form in SUPER_BYTES},
}
"""By kind: makes a random one of so many outputs and inputs, which are a multiple of a number."""


def made(name: str, seed: int) -> tuple[Any, np.random.Generator]:
    random = np.random.default_rng(seed)
    make, step = LAYERS[name]
    return make(random, int(random.integers(1, 80)), step * int(random.integers(1, 3 + 160 // step))), random


def product() -> Callable[[PackedLinear, torch.Tensor], torch.Tensor]:
    pytest.importorskip("triton")
    from decodery.models.cuda.packed_kernel import product as found

    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LAYERS)
def test_packed_layers_are_the_weights_of_the_cpu(name: str, seed: int) -> None:
    layer, random = made(name, seed)
    found = packed_linear(layer, torch.float32)
    assert found is not None and found.shape == layer.shape
    expected = layer.dense()
    assert torch.allclose(found.dense(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    some = torch.from_numpy(random.integers(0, layer.shape[0], 5))
    assert torch.equal(found.some(some).dense(), found.dense()[some])
    rows = torch.from_numpy(random.normal(size=(4, layer.shape[1]))).float()
    wanted = rows.double() @ expected.double().T + (0.0 if layer.bias is None else layer.bias.double())
    assert (found(rows).double() - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert torch.equal(floating(found).weight, found.dense())


@pytest.mark.parametrize("name", LAYERS)
def test_what_processes_add_up_of_some_inputs_is_the_whole(name: str) -> None:
    random = np.random.default_rng(3)
    layer = packed_linear(LAYERS[name][0](random, 6, 512), torch.float32)
    assert layer is not None
    if layer.order is not None:
        with pytest.raises(UnsupportedModel, match="act-order"):
            some_inputs(layer, 0, 128)
        return
    # Groups have 128 inputs at most; some cuts go through those that share more.
    parts = [some_inputs(layer, first, last) for first, last in pairwise((0, 128, 256, 512))]
    assert torch.allclose(torch.cat([part.dense() for part in parts], dim=1), layer.dense(), rtol=1e-6)
    rows = torch.from_numpy(random.normal(size=(3, 512))).float()
    each = zip(parts, rows.split([128, 128, 256], dim=1), strict=True)
    added = sum((part(own) for part, own in each), torch.zeros(3, 6))
    whole = layer(rows) if layer.bias is None else layer(rows) - layer.bias
    assert (added - whole).abs().max() < 1e-5 * whole.abs().max()
    if layer.group < 512:
        with pytest.raises(UnsupportedModel, match=f"by {layer.group} inputs are not cut at 0 to 8"):
            some_inputs(layer, 0, 8)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.float16, 19)])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_multiply_by_the_weights_of_the_cpu(name: str, dtype: torch.dtype, rows: int) -> None:
    layer, random = made(name, 10 + rows)
    found = packed_linear(layer, dtype)
    assert found is not None
    found = found.to(DEVICE)
    given = torch.from_numpy(random.normal(size=(rows, layer.shape[1]))).to(DEVICE, dtype)
    order = slice(None) if found.order is None else found.order
    # Programs share inputs out where there are more tiles of them than parts.
    answer = product()(found, given[:, order], parts=1 if rows == 1 else 3).double().cpu()
    wide = given.double().cpu()
    wanted = wide @ layer.dense().double().T + (0.0 if layer.bias is None else layer.bias.double())
    allowed = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    assert answer.shape == (rows, layer.shape[0]) and (answer - wanted).abs().max() < allowed * wanted.abs().max()


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_multiply_by_some_outputs_where_they_lie(name: str) -> None:
    """An expert is a part of the matrix of all experts."""
    layer, random = made(name, 21)
    found = packed_linear(layer, torch.float32)
    assert found is not None
    first = layer.shape[0] // 3
    part = rows_of(found.to(DEVICE), first, layer.shape[0] - first)
    assert isinstance(part, PackedLinear) and part.codes.untyped_storage().nbytes() == found.codes.nbytes
    given = torch.from_numpy(random.normal(size=(5, layer.shape[1]))).to(DEVICE, torch.float32)
    order = slice(None) if part.order is None else part.order
    wanted = given.double().cpu() @ layer.dense().double().T + (0.0 if layer.bias is None else layer.bias.double())
    answer, wanted = product()(part, given[:, order]).double().cpu(), wanted[:, first:]
    assert (answer - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("changes", MIXTURES)
def test_mixtures_over_packed_experts_are_those_of_their_weights(changes: str) -> None:
    base = drawn(ModelConfig(**MIXED | MIXTURES[changes]))
    assert packs(base.config) and not packs(replace(base.config, experts_beside=True))
    weights = packed_weights(base.weights, torch.float32, torch.device("cpu"))
    assert isinstance(weights.layers[-1].gate_up, PackedLinear)
    packed = Transformer(base.config, weights)
    dense = Transformer(base.config, packed_weights(floated(base.weights), torch.float32, torch.device("cpu")))
    assert isinstance(dense.weights.layers[-1].gate_up, Dense)
    batch = lambda model: Batch([Segment.chunk(range(40), model.new_cache())])  # noqa: E731
    found, wanted = (model.forward(batch(model)).logits.double() for model in (packed, dense))
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    # Another expert's weights give other logits.
    layer = weights.layers[-1]
    layer.gate_up = layer.gate_up.some(torch.arange(layer.gate_up.shape[0]).roll(1))
    other = Transformer(base.config, weights)
    assert (other.forward(batch(other)).logits.double() - wanted).norm() > 1e-3 * wanted.norm()


@pytest.mark.parametrize("changes", HYBRIDS)
def test_hybrids_over_packed_weights_are_those_of_their_weights(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, in the bits of its rows; kernels get rows of the shape that they take."""
    base, device, called = drawn(ModelConfig(**MIXED | HYBRIDS[changes])), torch.device("meta:0"), list[int]()
    assert packs(base.config) and not packs(replace(base.config, layer_inputs=8))

    def kernel(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        called.append(rows.dim())
        return linear(rows, layer.dense().to(rows.dtype), layer.bias)

    for dtype in (torch.float32, torch.bfloat16):
        found = []
        with Devices():
            for weights in (base.weights, floated(base.weights)):
                model = Transformer(base.config, packed_weights(weights, dtype, device))
                monkeypatch.setattr(of_device, "packed_kernel", lambda rows: kernel)
                cache = after(model, 9, 3)
                found.append(tree_logits(model, cache, PARENTS, list(range(len(PARENTS)))).double().cpu())
        assert model.dtype == dtype and (found[0] - found[1]).norm() <= 1e-6 * found[1].norm()
    assert len(called) > 8 and set(called) == {2}
    # Other weights of a recurrent layer give other logits.
    layer = base.weights.layers[0]
    layer.qkv = layer.qkv.some(torch.arange(layer.qkv.shape[0]).roll(1))
    with Devices():
        model = Transformer(base.config, packed_weights(base.weights, torch.bfloat16, device))
        other = tree_logits(model, after(model, 9, 3), PARENTS, list(range(len(PARENTS)))).double().cpu()
    assert (other - found[1]).norm() > 1e-2 * found[1].norm()


def floated(weights: Weights) -> Weights:
    """Weights with all quantized layers written out."""

    def written(part: Any) -> Any:
        return floating(part) if hasattr(part, "dense") and not isinstance(part, Dense) else part

    layers = [replace(layer, **{name: written(part) for name, part in vars(layer).items()}) for layer in weights.layers]
    return replace(weights, layers=layers, head=written(weights.head))


def test_a_wrong_zero_is_found_out() -> None:
    layer, random = made("blocks of 6 bits", 3)
    found = packed_linear(layer, torch.float32)
    assert found is not None
    found.zero += 1
    rows = torch.from_numpy(random.normal(size=(3, layer.shape[1]))).to(DEVICE, torch.float32)
    answer, wanted = product()(found.to(DEVICE), rows).cpu(), rows.cpu() @ layer.dense().T
    assert (answer - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_there_is_a_kernel_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(1, 8)
    assert of_device.packed_kernel(rows) is None
    found = product()
    monkeypatch.setattr(of_device, "launches", lambda device: True)
    with Devices():
        far: Any = FarTensor(rows, torch.device("cuda:0"))
        assert of_device.packed_kernel(far) is found
        assert of_device.packed_kernel(FarTensor(rows.double(), torch.device("cuda:0"))) is None
        monkeypatch.setattr(of_device, "launches", lambda device: False)
        assert of_device.packed_kernel(far) is None


def test_models_over_packed_weights_decode_alike_with_drafts() -> None:
    base = to_int8(tiny_transformer(dtype=torch.float32))
    model = Transformer(base.config, packed_weights(base.weights, torch.float32, torch.device("cpu")))
    assert isinstance(model.weights.layers[0].qkv, PackedLinear) and model.dtype == torch.float32
    # By these `auto` knows what passes cost.
    assert precision(model) == "int8" and 0.9 < weight_bytes(model) / weight_bytes(base) < 1.1
    rows = [each.forward(Batch([Segment.chunk(range(9), each.new_cache())])).logits.double() for each in (base, model)]
    assert (rows[0] - rows[1]).norm() < 3e-2 * rows[0].norm()
    check_identical(model, [[1, 2, 3], [5, 6] * 6], drafter="prompt-lookup", near_tie=1e-3, excuses=2)


def test_what_is_not_kept_packed_stays_as_it_is() -> None:
    ternary = TernaryLinear(torch.zeros(4, 2, dtype=torch.uint8), torch.ones(4))
    assert packed_linear(ternary, torch.float32) is None
    base = tiny_transformer(dtype=torch.float32)
    base.weights.head = ternary
    kept = packed_weights(base.weights, torch.bfloat16, torch.device("cpu"))
    first = kept.layers[0].qkv
    assert isinstance(kept.head, TernaryLinear) and isinstance(first, Dense) and first.weight.dtype == torch.bfloat16


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from decodery.models.cuda import packed_kernel

SIZES = {"INPUTS": 512, "GROUP": 32, "ROWS": 16, "OUT": 32, "BLOCK": 64, "OWN": 128, "PARTS": 4}
SIZES |= {"SCALED": False, "BIASED": True, "STEPS": True}
KINDS = {"rows": "*bf16", "found": "*bf16", "table": "*fp32", "scale": "*fp32", "bias": "*fp32", "codes": "*u8"}
ALL = {
    "Q4_K": ({"BITS": 4, "ZERO": 0, "TABLED": False, "SUPERS": True, "LEASTS": True, "LEAST_SUPERS": True}, "*u8"),
    "AWQ": ({"BITS": 4, "ZERO": 0, "TABLED": False, "SUPERS": False, "LEASTS": True, "LEAST_SUPERS": False}, "*fp16"),
    "Q6_K": ({"BITS": 6, "ZERO": 32, "TABLED": False, "SUPERS": True, "LEASTS": False, "LEAST_SUPERS": False}, "*i8"),
    "NVFP4": ({"BITS": 4, "ZERO": 0, "TABLED": True, "SUPERS": False, "LEASTS": False, "LEAST_SUPERS": False}, "*fp16"),
    "FP8": ({"BITS": 8, "ZERO": 0, "TABLED": True, "SUPERS": False, "LEASTS": False, "LEAST_SUPERS": False}, "*fp32"),
}
for sizes, steps in ALL.values():
    sizes, kernel = SIZES | sizes, packed_kernel._product
    kinds = KINDS | {"steps": steps, "leasts": steps, "supers": "*fp16", "least_supers": "*fp16"}
    kinds = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in kernel.arg_names}
    for capability in (80, 90):
        source = ASTSource(kernel, kinds, constexprs=sizes)
        print(len(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
kernel, sizes = packed_kernel._add, {"SCALED": True, "BIASED": True, "PARTS": 4, "BLOCK": 512}
kinds = {"parts": "*fp32", "scale": "*fp32", "bias": "*fp32", "found": "*bf16", "count": "i32", "outputs": "i32"}
source = ASTSource(kernel, kinds | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
print(len(compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""


def test_kernels_compile_for_a_card() -> None:
    """Machine code of an A100 and an H100 comes out, which needs none to be made."""
    pytest.importorskip("triton")
    assert [size > 1000 for size in machine_code(COMPILED)] == [True] * 11
