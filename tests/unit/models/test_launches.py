"""Triton's kernels are launched where that works, compiled once for passes of all sizes, and fit a card's memory."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from card_kernels import machine_code
from decodery.models.cuda.launches import launches


def _kernels(monkeypatch: pytest.MonkeyPatch, gate: object) -> None:
    """Let a module stand for the kernels that are tried."""
    module = ModuleType("fused_kernel")
    vars(module)["gate"] = gate
    monkeypatch.setitem(sys.modules, "decodery.models.cuda.fused_kernel", module)
    monkeypatch.setattr("decodery.models.cuda.launches.find_spec", lambda name: module)


def test_kernels_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.Tensor] = []
    _kernels(monkeypatch, lambda rows, kind: tried.append(rows))
    launches.cache_clear()
    assert launches(torch.device("cpu")) and launches(torch.device("cpu"))
    assert [rows.shape for rows in tried] == [(1, 2)]
    launches.cache_clear()


def test_a_warning_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def gate(rows: torch.Tensor, kind: str) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore of it.")

    _kernels(monkeypatch, gate)
    launches.cache_clear()
    with pytest.warns(UserWarning, match=r"passes on cpu take .* slower: .* a C compiler .*Failed to find C compiler"):
        assert not launches(torch.device("cpu"))
    launches.cache_clear()
    monkeypatch.setattr("decodery.models.cuda.launches.find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="Triton is not installed"):
        assert not launches(torch.device("cpu"))
    launches.cache_clear()


VARIANTS = """
from contextlib import nullcontext
from weakref import WeakValueDictionary

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from decodery.models.batch import Segment
from decodery.models.cache import page_pool
from decodery.models.cache.cache import KVCache
from decodery.models.cuda import packed_kernel, paged_kernel
from decodery.models.native.int4 import Int4Linear
from decodery.models.torch.packed_linear import packed_linear
from decodery.models.torch.paged_rows import PagedRows
from decodery.testing import tiny_transformer

page_pool.library, page_pool._pools = lambda: None, WeakValueDictionary()
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class Counted:
    def __init__(self, kernel):
        self.bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        self.found = set()

    def __getitem__(self, grid):
        return lambda *given, **sizes: self.found.add(str(self.bind(*given, **sizes)[1]))


kernels = {}
for module, names in ((paged_kernel, ("_write", "_attend")), (packed_kernel, ("_product",))):
    for name in names:
        kernels[name] = Counted(getattr(module, name))
        setattr(module, name, kernels[name])
config = tiny_transformer().config
layer = packed_linear(Int4Linear(torch.zeros(8, 16, dtype=torch.uint8), *torch.zeros(2, 8, 1).half()), torch.float32)
for rows in (*range(1, 20), 33, 48, 64, 100, 256):
    for texts in (1, 2, 3, 16):
        segments = []
        for _ in range(texts):
            cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=torch.float16)
            cache.reserve(np.arange(rows))
            segments.append(Segment(np.arange(rows), np.zeros(rows, dtype=np.int64), cache=cache))
        step = PagedRows.of(segments, config, [None], torch.float16)
        shape = rows * texts, config.num_kv_heads, config.head_dim
        queries = torch.zeros(shape[0], config.num_heads, config.head_dim).half()
        paged_kernel.attend(step, step.tables[:, 0], 0, queries, *torch.zeros(2, *shape).half(), 1.0, parts=1)
    packed_kernel.product(layer, torch.zeros(rows, 32))
for kernel in kernels.values():
    print(len(kernel.found))
"""


def test_passes_of_all_sizes_share_compiled_kernels() -> None:
    """A kernel is compiled for what it was given: each kind of numbers or addresses would stop a server for seconds."""
    pytest.importorskip("triton")
    # One; tiles of few rows and of many; 16, 32 and 64 rows.
    assert machine_code(VARIANTS) == [1, 2, 3]


SHARED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from decodery.models.cuda import paged_kernel
from decodery.models.torch.paged_rows import rows_of_tile

kernel = paged_kernel._attend
for dtype, name, rows in ((torch.bfloat16, "*bf16", 64), (torch.float32, "*fp32", 16)):
    assert max(rows_of_tile(512, 4, dtype) * 4, 16) == rows
    sizes = {"HEADS": 8, "GROUP": 4, "DIM": 256, "WIDE": 256, "ROWS": rows, "CAPPED": False, "SINKS": False, "PARTS": 1}
    sizes |= {"BLOCK": paged_kernel.block_of(256, dtype), "PAGE": 16 * 256, "CODED": 0}
    kinds = {name: "*i32" for name in ("table", "tiles", "begins", "bits")} | {"scale": "fp32", "cap": "fp32"}
    integers = ("rows", "query_row", "of_place", "of_head", "words")
    kinds = {each: kinds.get(each, "i32" if each in integers else name) for each in kernel.arg_names}
    kinds |= dict.fromkeys(sizes, "constexpr") | dict.fromkeys(("largest", "sums"), "*fp32")
    attrs = {(number,): [["tt.divisibility", 16]] for number, each in enumerate(kinds) if kinds[each] == name}
    found = compile(ASTSource(kernel, kinds, constexprs=sizes, attrs=attrs), target=GPUTarget("cuda", 86, 32))
    print(found.metadata.shared)
"""


def test_the_widest_heads_fit_the_memory_of_a_small_card() -> None:
    pytest.importorskip("triton")
    assert max(machine_code(SHARED)) <= 99 << 10
