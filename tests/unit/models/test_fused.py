"""Norms, rotations and gates as one kernel each equal float64, in Triton's interpreter, and serve a model's passes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, rms_norm, silu

from card_kernels import machine_code
from decodery.models.batch import Batch, Segment
from decodery.models.torch import fused
from decodery.models.torch.attention import rotate
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense
from decodery.testing import tiny_transformer
from far import Devices, FarTensor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    # As tests/conftest.py says, for the GPU kit, which collects this file alone.
    os.environ["TRITON_INTERPRET"] = "1"

# On a GPU all of it runs there, and compiled, by `benchmarks/gpu` as well.
pytestmark = [pytest.mark.cuda] if CUDA else []

ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EPS = 1e-5


def kernels() -> Any:
    pytest.importorskip("triton")
    from decodery.models.cuda import fused_kernel

    return fused_kernel


def numbers(random: np.random.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that do not lie one after another."""
    wider = torch.from_numpy(random.normal(0, 2, (*shape[:-1], shape[-1] + 8))).to(DEVICE, dtype)
    return wider[..., : shape[-1]]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in what is allowed."""
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max()) / ALLOWED[found.dtype]


def of_norms(dtype: torch.dtype, random: np.random.Generator, eps: float = EPS) -> float:
    rows, width = int(random.integers(1, 6)), int(random.choice([8, 40, 128, 576]))
    given, branches = (numbers(random, rows, width, dtype=dtype) for _ in range(2))
    # Weights may have more bits than rows.
    weight = numbers(random, width, dtype=dtype if random.random() < 0.5 else torch.float32)
    normed = kernels().norm(given, weight, eps)
    sums, of_sums = kernels().add_norm(given, branches, weight, eps)
    assert torch.equal(sums, (given.float() + branches.float()).to(dtype))
    return max(
        apart(found, rms_norm(read.double(), (width,), weight.double(), EPS))
        for found, read in ((normed, given), (of_sums, sums))
    )


def of_turns(dtype: torch.dtype, random: np.random.Generator, shift: int = 0) -> float:
    rows, heads, kv_heads = (int(random.integers(1, 5)) for _ in range(3))
    dim = int(random.choice([8, 24, 64, 80]))
    given = numbers(random, rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.from_numpy(random.uniform(0, 6, (rows, 1, dim // 2))).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = tuple(numbers(random, dim, dtype=torch.float32) for _ in range(2)) if random.random() < 0.5 else None
    found = kernels().turn(given, heads + shift, kv_heads - shift, cos, sin, norms, EPS)
    wide = given.double().reshape(rows, -1, dim)[:, : heads + kv_heads]
    if norms is not None:
        parts = wide.split((heads, kv_heads), dim=1)
        wide = torch.cat([rms_norm(part, (dim,), own.double(), EPS) for part, own in zip(parts, norms, strict=True)], 1)
    return apart(found, rotate(wide, cos.double(), sin.double()))


def of_gates(dtype: torch.dtype, random: np.random.Generator, kind: str | None = None) -> float:
    name = str(random.choice(list(kernels().GATES)))
    given = numbers(random, int(random.integers(1, 5)), 2 * int(random.choice([12, 96, 1100])), dtype=dtype)
    given[0, 0], given[0, 1] = -200.0, 200.0
    gate, up = given.double().chunk(2, dim=1)
    wanted = (silu(gate) if name == "silu" else gelu(gate, approximate="tanh")) * up
    return apart(kernels().gate(given, kind or name), wanted)


KINDS: dict[str, tuple[Callable[..., float], dict[str, Any]]] = {
    "norms": (of_norms, {"eps": 0.3}),
    "turns": (of_turns, {"shift": 1}),
    "gates": (of_gates, {"kind": "gelu_tanh"}),
}
"""And what makes each wrong."""


# Of a gate far below 0 the interpreter says that its exponential is infinite.
@pytest.mark.filterwarnings("ignore:overflow")
# The interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_float64(kind: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(7)
    assert max(KINDS[kind][0](dtype, random) for _ in range(6)) < 1


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_settings_are_found_out(kind: str) -> None:
    random, (compare, wrong) = np.random.default_rng(7), KINDS[kind]
    assert max(compare(torch.float32, random, **wrong) for _ in range(6)) > 20


CHANGES: dict[str, tuple[dict[str, Any], Counter[str]]] = {
    "plain": ({}, Counter(norm=3, turn=2, add_norm=2, gate=2)),
    "gelu_tanh": ({"activation": "gelu_tanh"}, Counter(norm=3, turn=2, add_norm=2, gate=2)),
    # No kernel has the gate, or what lies between the two is read by both.
    "gelu": ({"activation": "gelu"}, Counter(norm=3, turn=2, add_norm=2)),
    "parallel": ({"parallel": True}, Counter(norm=5, turn=2, gate=2)),
    "norms after": ({"norms_after": True}, Counter(norm=5, turn=2, gate=2)),
}
"""Configurations of two layers, and the launches of a pass."""


@pytest.mark.parametrize("changes", CHANGES)
def test_passes_by_kernels_equal_those_of_pytorch(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Counter[str] = Counter()
    module = kernels()

    class Counting:
        GATES = module.GATES

        def __getattr__(self, name: str) -> Any:
            launched[name] += 1
            return getattr(module, name)

    base = tiny_transformer(dtype=torch.float32)
    model = Transformer(replace(base.config, **CHANGES[changes][0]), base.weights)
    logits = []
    for _ in range(2):
        with torch.no_grad():
            logits.append(model.forward(Batch([Segment.chunk(range(9), model.new_cache())])).logits)
        monkeypatch.setattr(fused, "kernels_for", lambda rows: Counting() if rows.dim() == 2 else None)
    assert launched == CHANGES[changes][1]
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[0].abs().max()


def test_queries_of_layers_without_keys_are_normed_and_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such layers read keys of an earlier one, and have no norm of their own for them."""
    base, found, module = tiny_transformer(dtype=torch.float32), list[torch.Tensor](), kernels()
    heads, dim, first = base.config.num_heads, base.config.head_dim, base.weights.layers[0]
    model = Transformer(replace(base.config, qk_norm=True), base.weights)
    assert isinstance(first.qkv, Dense)
    own = Dense(first.qkv.weight[: heads * dim])
    layer = replace(first, qkv=own, q_norm=torch.linspace(0.5, 2.0, dim), k_norm=None)
    rows, angles = torch.randn(3, base.config.hidden_size), torch.randn(3, 1, dim // 2)
    for _ in range(2):
        queries, keys, _ = model._heads(layer, rows, angles.cos(), angles.sin(), shape=(0, dim))
        assert keys.shape[1] == 0
        found.append(queries)
        monkeypatch.setattr(fused, "kernels_for", lambda rows: module)
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_there_are_kernels_for_cuda_alone_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found, rows = kernels(), torch.zeros(2, 8)
    monkeypatch.setattr(fused, "launches", lambda device: True)
    with torch.no_grad(), Devices():
        far: Any = FarTensor(rows, torch.device("cuda:0"))
        assert fused.kernels_for(far) is found and fused.kernels_for(rows) is None
        for other in (rows.double(), rows[0]):
            assert fused.kernels_for(FarTensor(other, torch.device("cuda:0"))) is None
        with torch.enable_grad():
            assert fused.kernels_for(far) is None
        monkeypatch.setattr(fused, "launches", lambda device: False)
        assert fused.kernels_for(far) is None


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from decodery.models.cuda import fused_kernel

SIZES = {"WIDTH": 4096, "ADDS": True, "ALL": 40, "HALF": 64, "NORMED": True, "KIND": 2, "BLOCK": 1024}
INTEGERS = "row_size", "branch_size", "heads", "inner"
for kernel, wide in ((fused_kernel._norm, 4096), (fused_kernel._turn, 64), (fused_kernel._gate, 0)):
    sizes = {name: size for name, size in (SIZES | {"WIDE": wide}).items() if name in kernel.arg_names}
    kinds = dict.fromkeys(kernel.arg_names, "*bf16") | dict.fromkeys(sizes, "constexpr") | {"eps": "fp32"}
    kinds = {name: "i32" if name in INTEGERS else kinds[name] for name in kernel.arg_names}
    for capability in (80, 90):
        source = ASTSource(kernel, kinds, constexprs=sizes)
        print(len(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
"""


def test_kernels_compile_for_a_card() -> None:
    """Machine code of an A100 and an H100 comes out, which needs none to be made."""
    pytest.importorskip("triton")
    assert [size > 1000 for size in machine_code(COMPILED)] == [True] * 6
