"""The native stack: the same bits for a row whatever else is in the pass, and the same as PyTorch alone."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from covering import in_turn
from decodery.core.errors import CorruptFile, NumericalError
from decodery.core.native.kernels import check_layout, choose, kernel_sets, library, read_bandwidth, status
from decodery.core.topk import log_probabilities, softmax_sums, topk
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig, Rope, Temperature
from decodery.models.hooks import HookPoint, Hooks
from decodery.models.layer_plan import WHOLE, LayerStep, layer_steps
from decodery.models.native import stack as native
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.portable import PortableStack
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Layer, Weights

KEPT = [torch.float32, torch.float16, torch.int8]
"""What keys and values may lie in."""
LLAMA = ModelConfig(
    vocab_size=97, hidden_size=72, intermediate_size=104, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=512,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "wide-heads": replace(LLAMA, head_dim=64, attention_scale=0.125, num_heads=6),
    "wider-heads": replace(LLAMA, head_dim=128, attention_scale=0.1, num_heads=2, num_kv_heads=1),
    "odd-heads, capped": replace(
        LLAMA, head_dim=20, num_heads=6, num_kv_heads=3, attention_cap=1.5, logit_cap=3.0, sinks=True,
        sliding_window=9, sliding_layers=(True, False, False),
    ),
    "qwen2": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True),
    "gemma3": replace(
        LLAMA, qk_norm=True, sandwich_norms=True, activation="gelu_tanh", sliding_window=9,
        sliding_layers=(True, False, True), rope=Rope(theta=1e6), local_rope=Rope(theta=1e4),
    ),
    "olmo3": replace(
        LLAMA, norms_after=True, qk_norm=True, wide_qk_norm=True, sliding_window=9, sliding_layers=(True, False, True),
        rope=Rope(theta=1e6), local_rope=Rope(theta=1e4),
    ),
    "late norms, multiplied": replace(
        LLAMA, qk_norm=True, norms_after_rope=True, residual_scale=0.3, local_rope=Rope(kind="none"),
        local_rope_layers=(False, True, False),
    ),
    "chunked": replace(
        LLAMA, sliding_window=9, sliding_layers=(True, False, True), chunked=True, unit_norms=True,
        local_rope=Rope(kind="none"), local_rope_layers=(False, True, False),
        temperature=Temperature(0.3, 7, 1, unturned=True),
    ),
}  # fmt: skip


def make(config: ModelConfig, seed: int = 0) -> tuple[Transformer, PortableStack, native.NativeStack | None]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def linear(out: int, inputs: int, bias: bool) -> Int8Linear:
        return Int8Linear.quantize(random(out, inputs, scale=inputs**-0.5), random(out) if bias else None)

    def norm(n: int) -> torch.Tensor:
        return 1.0 + random(n, scale=0.1)

    c = config
    inner = c.num_heads * c.head_dim
    normed = [c.head_dim * (heads if c.wide_qk_norm else 1) for heads in (c.num_heads, c.num_kv_heads)]
    layers = [
        Layer(
            norm(c.hidden_size),
            linear(inner + 2 * c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias),
            linear(c.hidden_size, inner, c.output_bias),
            norm(c.hidden_size),
            linear(2 * c.intermediate_size, c.hidden_size, c.mlp_bias),
            linear(c.hidden_size, c.intermediate_size, c.mlp_bias),
            *(map(norm, normed) if c.qk_norm else (None, None)),
            *((norm(c.hidden_size), norm(c.hidden_size)) if c.sandwich_norms else (None, None)),
            sinks=random(c.num_heads) if c.sinks else None,
        )
        for _ in range(c.num_layers)
    ]
    embedding = random(c.vocab_size, c.hidden_size)
    weights = Weights(embedding, layers, norm(c.hidden_size), Int8Linear.quantize(embedding))
    model = Transformer(config, weights)
    stack = None if library() is None else native.NativeStack(config, weights, model.angles)
    return model, PortableStack(config, weights, model.angles), stack


def run(model: Transformer, stack, segments: list[Segment], taps=()):
    batch = Batch(segments)
    for segment in segments:
        if segment.cache is not None:
            segment.cache.reserve(segment.positions, segment.retained)
    layers = model.config.num_layers
    hooks = Hooks.of(batch, taps, WHOLE, layers)
    hidden = hooks.visit(HookPoint("residual", 0), model.embed(batch).float())
    return stack.head(stack.layers(hidden, batch, layer_steps(WHOLE, layers), hooks)), hooks.tapped()


def through(stack, hidden: torch.Tensor, batch: Batch, *layers: int) -> torch.Tensor:
    return stack.layers(hidden, batch, [LayerStep(layer) for layer in layers], Hooks.reading(()))


def fill(model: Transformer, stack, tokens: np.ndarray, *, at_once: int = 512) -> KVCache:
    cache = model.new_cache()
    for start in range(0, len(tokens), at_once):
        part = tokens[start : start + at_once]
        run(model, stack, [Segment.chunk(part, cache)])
        cache.keep(range(len(part)))
    return cache


TOKENS = np.random.default_rng(0).integers(0, LLAMA.vocab_size, 150)
# Two branches: 0-1-2-3 and 0-4-5, the second also leading to 6.
PARENTS = [-1, 0, 1, 2, 0, 4, 5]
DEPTHS = [0, 1, 2, 3, 1, 2, 3]


def tree_mask(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@pytest.fixture(autouse=True)
def two_threads():
    """More than one, whatever the other tests use: stages must meet at their barriers."""
    lib = library()
    assert lib is not None, "build it first: python setup.py build_ext --inplace"
    lib.decodery_threads(2)
    yield lib
    lib.decodery_threads(torch.get_num_threads())


@pytest.fixture(params=["portable", *kernel_sets()])
def kernels(request):
    """Every way of running the stack on this machine."""
    if request.param == "portable":
        yield lambda made: made[1]
        return
    choose(request.param)
    yield lambda made: made[2]
    choose(kernel_sets()[0])


def test_library_is_built_where_a_compiler_is():
    """The extension is optional for users, never for the tests: a silent fallback would test nothing."""
    assert kernel_sets()[-1] == "portable C++"
    assert kernel_sets()[0] in status()


@pytest.mark.parametrize("name", CONFIGS)
def test_row_does_not_depend_on_the_pass(name, kernels):
    """Chunked prefill, one token at a time, a tree's branches and batch neighbours: equal to the last bit."""
    made = make(CONFIGS[name])
    model, stack = made[0], kernels(made)
    tokens = TOKENS[:24]
    whole, _ = run(model, stack, [Segment.chunk(tokens, model.new_cache())])
    cache = model.new_cache()
    for i, token in enumerate(tokens):
        logits, _ = run(model, stack, [Segment.chunk([token], cache)])
        assert torch.equal(logits[0], whole[i]), f"row {i}"
        cache.keep([0])

    ids = np.asarray([3, 4, 5, 6, 7, 8, 9])
    positions = cache.next_position + np.asarray(DEPTHS)
    tree = Segment(positions, ids, mask=tree_mask(PARENTS), cache=cache.fork())
    other = Segment.chunk(TOKENS[40:45], fill(model, stack, TOKENS[100:113], at_once=5))
    alone = Segment(np.arange(3), ids[:3])
    logits, _ = run(model, stack, [other, tree, alone])
    for node in range(len(ids)):
        path = np.flatnonzero(tree_mask(PARENTS)[node])
        chain, _ = run(model, stack, [Segment.chunk(ids[path], cache.fork())])
        assert torch.equal(chain[-1], logits[5 + node]), f"node {node}"
    fresh, _ = run(model, stack, [Segment.chunk(ids[:3], model.new_cache())])
    assert torch.equal(fresh, logits[12:])


@pytest.mark.parametrize(("name", "dtype"), in_turn(list(CONFIGS), KEPT))
def test_row_does_not_depend_on_the_passes_a_tree_is_fed_in(name, dtype, kernels):
    """Rows that stay from earlier passes count as if they were fed again: equal to the last bit."""
    made = make(CONFIGS[name])
    model, stack = made[0], kernels(made)
    config = model.config
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype)
    run(model, stack, [Segment.chunk(TOKENS[:12], cache)])
    cache.keep(range(12))
    positions, mask, ids = 12 + np.asarray(DEPTHS), tree_mask(PARENTS), np.arange(3, 10)
    whole, grown = cache.fork(), cache.fork()
    expected, _ = run(model, stack, [Segment(positions, ids, mask=mask, cache=whole)])
    rows, other = [], Segment.chunk(TOKENS[:5], model.new_cache())
    for retained, stop in ((0, 1), (1, 3), (3, 7)):
        new = slice(retained, stop)
        step = Segment(positions[new], ids[new], mask=mask[new, :stop], cache=grown, retained=retained)
        rows.append(run(model, stack, [other, step])[0][5:])
    assert torch.equal(torch.cat(rows), expected)
    # Without a mask the rows go on causally, after all that stay.
    chain = np.arange(12, 40)
    whole, _ = run(model, stack, [Segment(chain, TOKENS[chain], cache=cache)])
    run(model, stack, [Segment(chain[:20], TOKENS[chain[:20]], cache=cache)])
    rest, _ = run(model, stack, [Segment(chain[15:], TOKENS[chain[15:]], cache=cache, retained=15)])
    assert torch.equal(rest, whole[15:])


@pytest.mark.parametrize(("name", "dtype"), in_turn(["wide-heads", "gemma3"], KEPT))
def test_row_does_not_depend_on_where_pages_lie(name, dtype, kernels):
    """A text in many pieces, each of its forks kept alive, equals one that lies side by side."""
    made = make(CONFIGS[name])
    model, stack, config = made[0], kernels(made), CONFIGS[name]
    whole = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype)
    forks = [whole.fork()]
    for part in np.array_split(TOKENS[:80], 9):
        forks.append(forks[-1].fork())
        for cache in (whole, forks[-1]):
            run(model, stack, [Segment.chunk(part, cache)])
            cache.keep(range(len(part)))
    assert (np.diff(forks[-1].pages.table[0, 0]) != 1).any()
    tree = [
        Segment(80 + np.asarray(DEPTHS), np.arange(7), mask=tree_mask(PARENTS), cache=cache)
        for cache in (whole, forks[-1])
    ]
    assert torch.equal(run(model, stack, tree[:1])[0], run(model, stack, tree[1:])[0])


LONG = np.random.default_rng(1).integers(0, LLAMA.vocab_size, 600)


@functools.cache
def long_text(name, dtype):
    """What the fastest kernels make of a text so long that threads share each of its passes."""
    model, _, stack = make(CONFIGS[name])
    config = model.config
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype)
    run(model, stack, [Segment.chunk(LONG, cache)])
    cache.keep(range(len(LONG)))
    return cache


def branches(name, dtype):
    """One row each of many forks of a long text, which have gone on for some tokens or begun anew halfway; a tree."""
    model, _, stack = make(CONFIGS[name])
    forks = [long_text(name, dtype).fork() for _ in range(9)]
    forks[4].truncate(301)
    for i, fork in enumerate(forks):
        part = TOKENS[9 * i : 9 * i + 1 + i % 3 * 11 + i // 4 * 60]
        run(model, stack, [Segment.chunk(part, fork)])
        fork.keep(range(len(part)))
    rows = [Segment.chunk([3 + i], fork) for i, fork in enumerate(forks[:8])]
    places = forks[8].next_position + np.asarray([0, 1, 1])
    return [*rows, Segment(places, np.asarray([5, 6, 7]), mask=tree_mask([-1, 0, 0]), cache=forks[8])]


@functools.cache
def branches_alone(name, dtype):
    """The same, each in a pass of its own on PyTorch alone: [rows, vocab]."""
    model, stack, _ = make(CONFIGS[name])
    return torch.cat([run(model, stack, [segment])[0] for segment in branches(name, dtype)])


@pytest.mark.parametrize(("name", "dtype"), in_turn(["odd-heads, capped", "wide-heads", "wider-heads", "gemma3"], KEPT))
def test_row_does_not_depend_on_who_shares_a_long_text(name, dtype, kernels):
    """Branches whose beginning is read once for all of them, alone or among others: equal to the last bit."""
    made = make(CONFIGS[name])
    model, stack, segments = made[0], kernels(made), branches(name, dtype)
    expected = branches_alone(name, dtype)
    other = Segment.chunk(TOKENS[:3], model.new_cache())
    for order in (segments, [other, *segments]):
        together, _ = run(model, stack, order)
        assert torch.equal(together[-len(expected) :], expected)
    alone = torch.cat([run(model, stack, [segment])[0] for segment in segments])
    assert torch.equal(alone, expected)
    # The fork that has begun anew halfway reads what it holds, not what the others hold there.
    changed = segments[4].cache
    changed.pages.own(np.zeros_like(changed.lengths), changed.lengths)
    row = changed.pages.take(np.array([200]), [1])
    row[:, 0] += 1
    changed.pages.put(200, row, [1])
    moved, _ = run(model, stack, segments)
    assert not torch.equal(moved[4], expected[4])
    assert torch.equal(moved[:4], expected[:4]) and torch.equal(moved[5:], expected[5:])


def test_chunk_behind_a_long_text(kernels):
    """A prompt's chunk, whose rows threads do not share, and its last row alone, which they do."""
    made = make(CONFIGS["wide-heads"])
    model, stack = made[0], kernels(made)
    cache = long_text("wide-heads", torch.float32).fork()
    whole, _ = run(model, stack, [Segment.chunk(TOKENS[:20], cache)])
    run(model, stack, [Segment.chunk(TOKENS[:19], cache)])
    cache.keep(range(19))
    last, _ = run(model, stack, [Segment.chunk(TOKENS[19:20], cache)])
    assert torch.equal(last[0], whole[19])


@functools.cache
def all_told(name, portable):
    """A configuration's cache, its logits and its tapped states, as the kernels that are chosen have them."""
    model, stack, native_stack = make(CONFIGS[name])
    stack = stack if portable else native_stack
    cache = fill(model, stack, TOKENS[:140], at_once=90)
    segment = Segment(140 + np.asarray(DEPTHS), np.arange(7), mask=tree_mask(PARENTS), cache=cache)
    return cache, *run(model, stack, [segment], taps=(0, 2, 3))


@pytest.mark.parametrize("kernels", kernel_sets(), indirect=True)
@pytest.mark.parametrize("name", CONFIGS)
def test_all_kernels_give_the_same_bits(name, kernels):
    """Logits, tapped states and the cache of every kernel equal those of PyTorch alone."""
    first, logits, tapped = all_told(name, True)
    second, other, other_tapped = all_told.__wrapped__(name, False)
    caches = (first, second)
    assert torch.equal(logits, other)
    assert tapped.keys() == other_tapped.keys() == {0, 2, 3}
    assert all(torch.equal(tapped[layer], other_tapped[layer]) for layer in tapped)
    assert all(torch.equal(*(cache.view(layer)[kind] for cache in caches)) for layer in range(3) for kind in (0, 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_the_plain_transformer(name):
    """The same int8 layers inside the ordinary transformer: nearly the same logits, so nothing is left out."""
    model, stack, _ = make(CONFIGS[name])
    logits, _ = run(model, stack, [Segment.chunk(TOKENS[:40], model.new_cache())])
    expected = model.forward(Batch([Segment.chunk(TOKENS[:40], model.new_cache())])).logits
    # Rounding to int8 turns a difference in the last bit into one of 1/127 here and there.
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.9995


def test_a_bidirectional_mask_and_some_layers_only(kernels):
    made = make(LLAMA)
    model, stack = made[0], kernels(made)
    batch = Batch([Segment(np.arange(9), TOKENS[:9], mask=np.ones((9, 9), dtype=bool))])
    hidden = model.embed(batch)
    both = through(stack, hidden, batch, 0, 2)
    first = through(stack, hidden, batch, 0)
    assert torch.equal(both, through(stack, first, batch, 2))
    assert torch.equal(through(made[1], hidden, batch, 0, 2), both)
    changed = hidden.clone()
    changed[8] += 1.0
    assert not torch.equal(through(stack, changed, batch, 0, 2)[0], both[0]), "row 0 does not see row 8"


def test_float16_and_evicted_caches(kernels):
    made = make(LLAMA)
    model, stack = made[0], kernels(made)
    logits = []
    for which in (made[1], stack):
        cache = KVCache(3, 2, 16, dtype=torch.float16)
        for part in np.array_split(TOKENS[:90], 4):
            run(model, which, [Segment.chunk(part, cache)])
            cache.keep(range(len(part)))
        cache.evict(1, list(range(10, 40)))
        logits.append(run(model, which, [Segment.chunk(TOKENS[90:95], cache)])[0])
    assert torch.equal(*logits)


def test_not_a_number_is_not_hidden(kernels):
    made = make(LLAMA)
    model, stack = made[0], kernels(made)
    batch = Batch([Segment(np.arange(3), TOKENS[:3])])
    hidden = model.embed(batch).clone()
    hidden[1, 5] = torch.nan
    logits = stack.head(through(stack, hidden, batch, 0, 1, 2))
    assert logits[1].isnan().all()
    assert logits[0].isfinite().all()


def test_the_largest_of_many(kernels):
    torch.manual_seed(0)
    for vocab, k in ((1, 1), (130, 64), (49152, 6), (1000, 3)):
        logits = (2 * torch.randn(5, vocab)).round(decimals=1)  # with ties
        logits[1, vocab // 2 :] = -torch.inf
        logits[2] = torch.arange(vocab)
        ids, values = topk(logits, k)
        expected = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits.numpy()), axis=1)[:, :k]
        assert (ids == expected).all()
        assert (values == np.take_along_axis(logits.numpy(), expected, 1)).all()
        # Far below the largest ones too, where whole blocks are passed over.
        logits[2, vocab // 3] = torch.nan
        with pytest.raises(NumericalError, match="NaN"):
            topk(logits, k)


SUMS = {}


def test_sums_of_a_row(kernels):
    torch.manual_seed(0)
    for vocab in (1, 15, 16, 130, 513, 49152):
        logits = 4 * torch.randn(3, vocab)
        logits[1, 1::3] = -torch.inf
        logits[2] = -3e3
        for row, law in enumerate(logits.double().log_softmax(-1)):
            for token in {0, vocab // 2, vocab - 1}:
                logprob, entropy = found = softmax_sums(logits, row, token)
                assert logprob == pytest.approx(float(law[token]), rel=1e-5, abs=1e-5)
                assert entropy == pytest.approx(-float((law.exp() * law).nan_to_num().sum()), abs=2e-5)
                # Every set of kernels adds in the same order.
                assert SUMS.setdefault((vocab, row, token), found) == found
                assert softmax_sums(logits.double(), row, token) == pytest.approx(found, rel=1e-5, abs=2e-5)
        tokens = [0, vocab // 2, vocab - 1]
        for kind in (logits, logits.double()):
            own = [softmax_sums(kind, row, token)[0] for row, token in enumerate(tokens)]
            assert log_probabilities(kind, tokens) == own
        for kind in (logits, logits.double()):
            kind[0, vocab // 2] = torch.nan
            with pytest.raises(NumericalError, match="NaN"):
                softmax_sums(kind, 0, 0)
            with pytest.raises(NumericalError, match="NaN"):
                log_probabilities(kind, tokens)


def test_threads_may_call_at_the_same_time():
    model, _, stack = make(LLAMA)
    expected, _ = run(model, stack, [Segment(np.arange(30), TOKENS[:30])])
    wrong = []

    def repeat() -> None:
        for _ in range(30):
            logits, _ = run(model, stack, [Segment(np.arange(30), TOKENS[:30])])
            if not torch.equal(logits, expected):
                wrong.append(logits)

    workers = [threading.Thread(target=repeat) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_process_gets_threads_of_its_own():
    import os

    linear = Int8Linear.quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    expected = linear(rows)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(linear(rows), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_result_does_not_depend_on_the_number_of_threads(threads, two_threads):
    model, _, stack = make(CONFIGS["gemma3"])
    expected, _ = run(model, stack, [Segment(np.arange(30), TOKENS[:30])])
    two_threads.decodery_threads(threads)
    assert torch.equal(run(model, stack, [Segment(np.arange(30), TOKENS[:30])])[0], expected)


def test_read_bandwidth_is_a_rate():
    assert 0.1 < read_bandwidth(mebibytes=64, rounds=2) < 10_000


def test_kernels_built_from_other_sources_are_refused():
    class Grown:  # a library whose segments have one field more
        @staticmethod
        def decodery_size(i: int) -> int:
            lib = library()
            assert lib is not None
            return int(lib.decodery_size(i)) + (8 if i == 4 else 0)

    lib = library()
    assert lib is not None
    check_layout(lib, Path("here"))
    for other in (Grown(), object()):
        with pytest.raises(CorruptFile, match=r"lib\.so was built from other sources: build it again"):
            check_layout(other, Path("lib.so"))
