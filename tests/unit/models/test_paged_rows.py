"""Attention of all texts of a pass in one call equals that of each text, in PyTorch and in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from card_kernels import machine_code
from decodery.models.batch import Segment
from decodery.models.cache import coded
from decodery.models.cache.cache import KVCache
from decodery.models.cache.device_tables import DeviceTables
from decodery.models.cache.page_pool import TensorPool
from decodery.models.config import ModelConfig
from decodery.models.torch import paged_rows
from decodery.models.torch.attention import attend, visible
from decodery.models.torch.paged_rows import PagedRows, kernel_for, serves, windows_of
from decodery.step.draft_tree import DraftTree
from decodery.testing import tiny_transformer

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    # As tests/conftest.py says, for the GPU kit, which collects this file alone.
    os.environ["TRITON_INTERPRET"] = "1"

pytestmark = [
    pytest.mark.usefixtures("pools_of_pytorch"),
    # On a GPU all of it runs there, and compiled, by `benchmarks/gpu` as well.
    *([pytest.mark.cuda] if CUDA else []),
]


def kernel() -> Callable[..., torch.Tensor]:
    pytest.importorskip("triton")
    from decodery.models.cuda.paged_kernel import attend as found

    return found


def config_of(random: np.random.Generator, window: int | None) -> ModelConfig:
    kv_heads, group = (int(random.integers(1, most)) for most in (4, 5))
    return replace(
        tiny_transformer().config,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=int(random.choice([8, 16, 24, 40])),
        sliding_window=None if window is None else abs(window),
        sliding_layers=(window is not None, False),
        chunked=window is not None and window < 0,
    )


def texts_of(
    random: np.random.Generator, config: ModelConfig, dtype: torch.dtype, held: torch.dtype, most_rows: int,
    size: float,
) -> list[Segment]:  # fmt: skip
    """Texts of some length, some of them forks, whose next rows are a token, a tree or the rest of a prompt."""
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    caches: list[KVCache] = []
    for _ in range(random.integers(1, 6)):
        if caches and random.random() < 0.3:
            caches.append(caches[-1].fork())
            continue
        cache, length = KVCache(*shape, dtype=held, device=DEVICE), int(random.integers(0, 90))
        if length:
            cache.reserve(np.arange(length))
            for layer in range(config.num_layers):
                keys, values = numbers(random, 2, length, *shape[1:], dtype=dtype)
                cache.write(layer, keys, values * size)
            cache.keep(range(length))
        caches.append(cache)
    segments = []
    for cache in caches:
        n = int(random.choice([1, 1, 3, most_rows]))
        parents = [-1, *(int(random.integers(0, node)) for node in range(1, n))]
        tree = DraftTree(np.zeros(n, dtype=np.int64), np.array(parents), "sampled")
        chain = random.random() < 0.5
        positions = cache.next_position + (np.arange(n) if chain else tree.depths)
        cache.reserve(positions)
        segments.append(Segment(positions, tree.tokens, mask=None if chain else tree.ancestor_mask(), cache=cache))
    return segments


def numbers(random: np.random.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape)).to(DEVICE, dtype)


def compare(
    seed: int, dtype: torch.dtype, window: int | None, cap: float, sinks: bool, attend_by: Callable[..., Any] | None,
    most_rows: int = 40, held: torch.dtype | None = None, size: float = 1.0,
) -> float:  # fmt: skip
    """A layer's attention beside the float64 attention of each text by itself, over the same keys and values."""
    random = np.random.default_rng(seed)
    config = config_of(random, window)
    segments, worst = texts_of(random, config, dtype, held or dtype, most_rows, size), 0.0
    assert all(serves(segment, config) for segment in segments)
    rows, windows = sum(map(len, segments)), windows_of(config)
    queries = numbers(random, rows, config.num_heads, config.head_dim, dtype=dtype)
    keys, values = numbers(random, 2, rows, config.num_kv_heads, config.head_dim, dtype=dtype)
    values *= size
    sink = numbers(random, config.num_heads, dtype=dtype) if sinks else None
    scale = config.head_dim**-0.5
    step = PagedRows.of(segments, config, windows, dtype)
    if attend_by is not None:
        step.kernel = attend_by
    for layer in range(config.num_layers):
        kind = windows.index(config.window(layer))
        found = step.attend(layer, kind, queries, keys, values, scale, cap, sink)
        first, parts = 0, []
        for segment in segments:
            cache = segment.cache
            assert cache is not None
            last = first + len(segment)
            own = cache.view(layer)
            for found_rows, given in zip(own, (keys, values), strict=True):
                written, meant = found_rows[:, cache.length :].transpose(0, 1), given[first:last]
                if held is None:
                    assert torch.equal(written, meant)
                else:
                    step_size = coded.apart(coded.encode(meant, held))[1] * (1 if held == coded.DTYPE else 32)
                    assert ((written - meant.float()).abs() <= 0.51 * step_size).all()
            mask = torch.from_numpy(visible(segment, layer, config.window(layer))).to(DEVICE)
            wide = (queries[first:last].double(), own[0].double(), own[1].double(), mask, scale, cap)
            parts.append(attend(*wide, None if sink is None else sink.double()))
            first = last
        allowed = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        worst = max(worst, float((found.double() - torch.cat(parts)).abs().max()) / (allowed * size))
    return worst


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("window", "cap", "sinks"), [(None, 0.0, False), (7, 0.0, True), (-16, 3.0, False), (20, 2.0, True)]
)
def test_pytorch_equals_attention_text_by_text(window: int | None, cap: float, sinks: bool, seed: int) -> None:
    assert compare(seed, torch.float64, window, cap, sinks, None) < 1


# The interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.float32, 1), (torch.float16, 4), *([(torch.bfloat16, 2)] if CUDA else [])]
)
@pytest.mark.parametrize(
    ("window", "cap", "sinks"), [(None, 0.0, False), (7, 0.0, True), (-16, 3.0, False), (20, 2.0, True)]
)
def test_kernels_equal_attention_text_by_text(
    window: int | None, cap: float, sinks: bool, dtype: torch.dtype, parts: int
) -> None:
    seed = 10 * parts + (window or 0)
    assert compare(abs(seed), dtype, window, cap, sinks, partial(kernel(), parts=parts), most_rows=18) < 1


def test_kernels_share_the_slots_of_few_texts_out() -> None:
    assert compare(1, torch.float32, None, 0.0, False, kernel(), most_rows=1) < 1


HELD = {"int8": coded.DTYPE, "float8": coded.FLOATS}
"""What pages hold in bytes, with a scale for each slot and head."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("held", HELD)
def test_pytorch_attends_over_bytes(held: str, seed: int) -> None:
    assert compare(seed, torch.float64, (None, 7, -16)[seed], 2.0 * (seed == 2), seed > 0, None, held=HELD[held]) < 1


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 1), (torch.float16, 4)])
@pytest.mark.parametrize("held", HELD)
def test_kernels_attend_over_bytes(held: str, dtype: torch.dtype, parts: int) -> None:
    attend_by = partial(kernel(), parts=parts)
    assert compare(parts, dtype, 20, 2.0, parts > 1, attend_by, most_rows=12, held=HELD[held]) < 1


@pytest.mark.parametrize("held", HELD)
def test_small_values_in_bytes_lose_nothing_in_float16(held: str) -> None:
    attend_by = partial(kernel(), parts=1)
    assert compare(3, torch.float16, None, 0.0, False, attend_by, most_rows=4, held=HELD[held], size=3e-5) < 1


def test_bytes_that_are_taken_for_others_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_by = partial(kernel(), parts=1)
    monkeypatch.setattr("decodery.models.cuda.paged_kernel._CODINGS", {coded.DTYPE: 1, coded.FLOATS: 1})
    with pytest.raises(AssertionError):
        assert compare(2, torch.float32, None, 0.0, False, attend_by, most_rows=8, held=coded.FLOATS) < 1


@pytest.mark.parametrize("held", HELD)
def test_kernels_write_the_bytes_of_the_formula(held: str) -> None:
    """Steps of rows of all sizes, zeros and numbers that are none among them."""
    found = kernel()
    random, dtype = np.random.default_rng(5), HELD[held]
    config = replace(tiny_transformer().config, num_kv_heads=1, num_heads=1, head_dim=16)
    cache = KVCache(config.num_layers, 1, 16, dtype=dtype, device=DEVICE)
    cache.reserve(np.arange(24))
    rows = numbers(random, 24, 1, 16, dtype=torch.float32) * 10.0 ** torch.arange(-12, 12, device=DEVICE)[:, None, None]
    rows[3] = 0.0
    rows[5, 0, 2], rows[6, 0, 3] = torch.inf, torch.nan
    segment = Segment(np.arange(24), np.zeros(24, dtype=np.int64), cache=cache)
    half, step = (PagedRows.of([segment], config, [None], dtype) for dtype in (torch.float16, torch.float32))
    # Tiles go by what is multiplied, whatever pages hold.
    assert (half.layout.tile_rows, step.layout.tile_rows) == (64, 16)
    found(step, step.tables[:, 0], 0, rows, rows, rows, 1.0)
    written, meant = cache.stored(0)[0][0], coded.encode(rows[:, 0], dtype)
    finite = [number for number in range(24) if number not in (5, 6)]
    # Scales of integers are quotients, which devices round in their last place.
    assert (written[finite].int() - meant[finite].int()).abs().max() <= (held == "int8")
    assert coded.decode(written)[[5, 6]].isnan().any(dim=-1).all()


def test_there_is_a_kernel_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TensorPool(8, torch.float32, torch.device("cpu"), 1 << 20)
    assert kernel_for(pool) is None
    pytest.importorskip("triton")
    monkeypatch.setattr(pool, "device", torch.device("cuda"))
    works = [True]
    monkeypatch.setattr(paged_rows, "launches", lambda device: works[0])
    assert kernel_for(pool) is kernel()
    works[0] = False
    assert kernel_for(pool) is None
    works[0] = True
    for wrong in ({"dtype": torch.float64}, {"row": 512}):
        other = TensorPool(8, torch.float32, torch.device("cpu"), 1 << 20)
        vars(other).update(device=torch.device("cuda"), **wrong)
        assert kernel_for(other) is None


def test_a_kernel_is_launched_on_the_device_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would launch it on the current one."""
    entered: list[torch.Tensor] = []

    @contextmanager
    def device_of(rows: torch.Tensor) -> Iterator[None]:
        entered.append(rows)
        yield
        entered.clear()

    config = tiny_transformer().config
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, device=DEVICE)
    cache.reserve(np.arange(2))
    step = PagedRows.of([Segment(np.arange(2), np.arange(2), cache=cache)], config, [None], torch.float32)

    def launched(step: PagedRows, table: torch.Tensor, kind: int, queries: torch.Tensor, *more: Any) -> torch.Tensor:
        assert entered[0] is queries
        return queries

    step.kernel = launched
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    rows = torch.zeros(2, 1, 8, device=DEVICE)
    assert step.attend(0, 0, rows, rows, rows, 1.0) is rows and not entered


def test_page_tables_are_uploaded_when_they_change() -> None:
    config = tiny_transformer().config
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, device=DEVICE)
    pool = cache.pages.pool
    assert isinstance(pool, TensorPool)
    tables = pool.tables(config.num_layers, config.num_kv_heads)
    cache.reserve(np.arange(20))
    (place,) = tables.places([cache.pages])
    for _ in range(3):
        tables.places([cache.pages])
    assert tables.uploads == 1 and place > 0
    held = tables.held[place].cpu().numpy()
    assert (held[:, :, :2] == cache.pages.table).all() and (held[:, :, 2:] == tables.spare).all()
    cache.wrote(range(config.num_layers))
    cache.keep(range(20))
    fork = cache.fork()
    fork.reserve(np.arange(20, 21))
    first, second = tables.places([cache.pages, fork.pages])
    assert (tables.held[int(first)] != tables.held[int(second)]).any() and tables.uploads == 2
    # A text that stands twice has one place.
    known, free = dict(tables._known), len(tables._free)
    third = fork.fork()
    twice = tables.places([third.pages, cache.pages, third.pages])
    assert twice[0] == twice[2] and tables.uploads == 3
    assert len(tables._known) == len(known) + 1 and len(tables._free) == free - 1
    cache.truncate(0)
    cache.shrink(0)
    tables.places([cache.pages])
    assert tables.uploads == 4 and (tables.held[int(first)] == tables.spare).all()


def test_places_of_texts_that_ended_are_used_again() -> None:
    config = tiny_transformer().config
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    tables = None
    for _ in range(100):
        cache = KVCache(*shape, device=DEVICE)
        cache.reserve(np.arange(3))
        assert isinstance(cache.pages.pool, TensorPool)
        tables = cache.pages.pool.tables(*shape[:2])
        tables.places([cache.pages])
    assert tables is not None and len(tables.held) <= 64


def test_texts_with_the_ids_of_those_that_ended_get_places() -> None:
    config = tiny_transformer().config
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    made = [KVCache(*shape, device=DEVICE) for _ in range(66)]
    for cache in made:
        cache.reserve(np.arange(3))
    pool = made[0].pages.pool
    assert isinstance(pool, TensorPool)
    tables = DeviceTables(*shape[:2], pool.device, int(pool.take(1)[0]))
    *texts, first, second = [cache.pages for cache in made]
    full = texts[: len(tables.held) - 1]
    tables.places(full)
    # Python gives ids out again.
    tables._known[id(first)] = tables._known.pop(id(full.pop()))
    del texts, made[len(full)]
    assert tables._known[id(first)].text() is None
    places = tables.places([*full, first, second])
    assert len(set(places.tolist())) == len(full) + 2


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from decodery.models.cuda import paged_kernel

SIZES = {"HEADS": 8, "GROUP": 4, "DIM": 64, "WIDE": 64, "ROWS": 16, "BLOCK": 64}
SIZES |= {"CAPPED": True, "SINKS": True, "PARTS": 4}
CODINGS = {0: ("*bf16", 16 * 64), 1: ("*i8", 16 * 66), 2: ("*u8", 16 * 66)}
KINDS = {name: "*bf16" for name in ("queries", "keys", "values", "sinks")}
KINDS |= {"key_scales": "*i16", "value_scales": "*i16"}
KINDS |= {name: "*i32" for name in ("table", "tiles", "begins", "bits", "places", "slots")}
KINDS |= {name: "*fp32" for name in ("largest", "sums", "found", "parts")} | {"scale": "fp32", "cap": "fp32"}
for coding, (pages, page) in CODINGS.items():
    sizes, given = SIZES | {"PAGE": page, "CODED": coding}, KINDS | {"key_pages": pages, "value_pages": pages}
    for kernel in (paged_kernel._write, paged_kernel._attend, paged_kernel._join):
        names = kernel.arg_names
        kinds = {name: "constexpr" if name in sizes else given.get(name, "i32") for name in names}
        source = ASTSource(kernel, kinds, constexprs={name: size for name, size in sizes.items() if name in names})
        for capability in (80, 90):
            print(len(compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
"""


def test_kernels_compile_for_a_card() -> None:
    """Machine code of an A100 and an H100 comes out, which needs none to be made."""
    pytest.importorskip("triton")
    assert [size > 1000 for size in machine_code(COMPILED)] == [True] * 18
