"""What kernels do by themselves for policies is what these do in Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decodery.core.native.kernels import choose, kernel_sets
from decodery.kv_cache.after_prompt import AfterPrompt
from decodery.kv_cache.double_sparsity import DoubleSparsity
from decodery.kv_cache.evicting import Evicting
from decodery.kv_cache.h2o import H2O
from decodery.kv_cache.localist import Dialled, Localist
from decodery.kv_cache.quantized import Quantized, Storing
from decodery.kv_cache.quest import Quest
from decodery.kv_cache.selecting import Selecting
from decodery.kv_cache.snapkv import SnapKV
from decodery.kv_cache.streaming_llm import Streaming, StreamingLLM
from decodery.kv_cache.tova import TOVA
from decodery.models.batch import Batch, Segment
from decodery.models.cache.account import resident
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kernel_policy import KernelPolicy
from decodery.models.cache.sparse_indices import SparseIndices
from decodery.models.torch.transformer import Transformer
from decodery.models.trained.key_channels import KeyChannels
from decodery.step.cache_policy import CachePolicy
from decodery.testing import tiny_transformer, to_int8
from in_16_bits import in_16_bits

RAW = tiny_transformer(0, num_layers=4, max_positions=512, dtype=torch.float32)
MODEL = to_int8(RAW)
TOKENS = np.random.default_rng(11).integers(0, 64, 400)
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=bool)
PROMPT = 150


def channels(seed: int = 0) -> KeyChannels:
    config, draw = MODEL.config, torch.Generator().manual_seed(seed)
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    return KeyChannels(torch.rand(shape, generator=draw).argsort(dim=-1))


def in_python(state: AttentionPolicy) -> AttentionPolicy:
    """The same state, of which kernels do nothing."""
    kind = type(state)
    state.__class__ = type(kind.__name__, (kind,), {"by_kernel": lambda self, segment: None})
    return state


def read(model: Transformer, cache: KVCache, stop: int, size: int = 64) -> torch.Tensor:
    logits = []
    while cache.next_position < stop:
        part = TOKENS[cache.next_position : min(cache.next_position + size, stop)]
        logits.append(model.forward(Batch([Segment.chunk(part, cache)])).logits)
        cache.keep(range(len(part)))
    return torch.cat(logits)


def written(policy: CachePolicy, *, python: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, KVCache]:
    """Logits of rows after a prompt: one by one, a tree and a chunk that is longer than two pages."""
    model = in_16_bits(RAW) if isinstance(policy, Quantized) else to_int8(RAW)
    if dtype != torch.float32:
        model.narrow_caches(dtype)
    cache = model.new_cache()
    state = policy.state(model, PROMPT)
    cache.policy = in_python(state) if python else state
    read(model, cache, PROMPT)
    found = [read(model, cache, PROMPT + 20, 1)]
    at = cache.next_position + TREE.sum(axis=1) - 1
    found.append(model.forward(Batch([Segment(at, TOKENS[at], mask=TREE, cache=cache)])).logits)
    cache.keep([0, 2])
    found.append(read(model, cache, PROMPT + 70, 40))
    return torch.cat(found), cache


POLICIES: list[Any] = [
    Quest(0.3), Quest(64, dense_layers=0, least=1), DoubleSparsity(0.3, calibration=channels()),
    DoubleSparsity(40, calibration=channels(), bits=0, dense_layers=0, sinks=2, recent=3),
    StreamingLLM(40), StreamingLLM(0.3, sinks=2, absolute=True), SnapKV(0.3), H2O(0.4), TOVA(0.3),
    Quantized(8, 32, 20), Quantized(4, 5, 1), Localist(0.8, block=7, sinks=2),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_kernels_do_what_python_does(policy: CachePolicy, dtype: torch.dtype) -> None:
    ours, cache = written(policy, python=False, dtype=dtype)
    theirs, other = written(policy, python=True, dtype=dtype)
    # In int8 pages weights are rounded once more, in other parts of what is read: sinks are one here. What Python
    # lowers it does not round.
    rough = dtype == torch.int8 and isinstance(policy, (StreamingLLM, Localist))
    # Kernels multiply codes with numbers of 16 bits.
    mean, most = (0.2, 9.0) if rough else (1e-3, 0.05) if isinstance(policy, Quantized) else (1e-4, 1e-3)
    assert float((ours - theirs).abs().mean()) < mean
    assert torch.allclose(ours, theirs, atol=most, rtol=0)
    assert cache.head_lengths.tolist() == other.head_lengths.tolist()


@pytest.mark.parametrize("policy", [Quantized(8, 32, 20), Quantized(4, 5, 1), H2O(0.4), TOVA(0.3)], ids=str)
def test_all_kernel_sets_read_the_same_bits(policy: CachePolicy) -> None:
    found = []
    try:
        for name in kernel_sets():
            choose(name)
            found.append(written(policy, python=False, dtype=torch.float16)[0])
    finally:
        choose(kernel_sets()[0])
    assert all(each.equal(found[0]) for each in found)


class OfAllPages(Quest):
    """Leaves out no page."""

    def choice(self, *about: Any) -> Any:
        found = super().choice(*about)
        assert found is not None
        return replace(found, counts=found.counts + 100)


class Unturned(Streaming):
    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        found = super().by_kernel(segment)
        assert found is not None and found.windows is not None
        cos, sin = found.windows.turned
        return replace(found, windows=replace(found.windows, turned=(torch.ones_like(cos), torch.zeros_like(sin))))


class MetWhereTheyAre(StreamingLLM):
    def state(self, model: Any, prompt: int) -> AttentionPolicy:
        return Unturned(self, model.config, prompt)


class FirstGroupLost(Storing):
    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        found = super().by_kernel(segment)
        assert found is not None and found.sealed is not None
        return replace(found, sealed=replace(found.sealed, ends=found.sealed.ends - self.method.group))


class LosingItsFirst(Quantized):
    def state(self, model: Any, prompt: int) -> AttentionPolicy:
        return FirstGroupLost(self, model.config, prompt)


class Unprotected(Evicting):
    """Recent tokens may go as well."""

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        found = super().by_kernel(segment)
        if found is None or found.eviction is None:
            return found
        return replace(found, eviction=replace(found.eviction, last=np.zeros_like(found.eviction.last)))


class WithoutWindow(H2O):
    def state(self, model: Any, prompt: int) -> AttentionPolicy:
        return Unprotected(self, model.config, prompt, by_kernel=True)


class Summing(Evicting):
    """Counts what all rows after the prompt pay, each head its own."""

    def _settle(self, cache: KVCache) -> None:
        super()._settle(cache)
        self.method = H2O(0.3, recent=0.0)


class OfAllRows(TOVA):
    def state(self, model: Any, prompt: int) -> AttentionPolicy:
        return Summing(self, model.config, prompt, by_kernel=True)


class RaisedElsewhere(Dialled):
    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        found = super().by_kernel(segment)
        assert found is not None and found.lowered is not None
        return replace(found, lowered=replace(found.lowered, by=-found.lowered.by))


class Raised(Localist):
    def state(self, model: Any, prompt: int) -> AttentionPolicy:
        return RaisedElsewhere(self, model.config, prompt)


WRONG: list[Any] = [
    (OfAllPages(0.3), Quest(0.3)), (MetWhereTheyAre(40), StreamingLLM(40)),
    (LosingItsFirst(8, 32, 20), Quantized(8, 32, 20)), (WithoutWindow(0.4), H2O(0.4)), (OfAllRows(0.3), TOVA(0.3)),
    (Raised(0.8, block=7), Localist(0.8, block=7)),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "right"), WRONG)
def test_wrong_kernels_would_show(wrong: CachePolicy, right: CachePolicy) -> None:
    ours, theirs = written(wrong, python=False)[0], written(right, python=True)[0]
    assert not torch.allclose(ours, theirs, atol=0.1, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_nothing_of_a_prompt_is_listed_slot_by_slot(policy: CachePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for each row and slot is taken nowhere while a prompt is read: neither lists nor weights."""
    listed = []
    right = SparseIndices.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, *about: Any) -> SparseIndices | None:
        found = right(cls, *about)
        listed.append(found)
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(SparseIndices, "of", classmethod(of))
    cache = MODEL.new_cache()
    cache.policy = policy.state(MODEL, PROMPT)
    read(MODEL, cache, PROMPT)
    assert not any(listed)


def test_what_pages_are_chosen_by_is_shared_and_counted() -> None:
    _, cache = written(Quest(0.3, dense_layers=0), python=False)
    state = cache.policy
    assert isinstance(state, Selecting) and len(state.tables) == 1
    held, page = resident([cache]), state.tables[0].pool.page_bytes
    assert held == cache.pages.held.size * cache.pages.pool.page_bytes + state.tables[0].held.size * page
    clone = cache.fork()
    assert resident([cache, clone]) == held
    # A fork that reads on copies what it writes to, and leaves the other's as it is.
    before = state.tables[0].read(0, 13)
    clone.truncate(PROMPT + 3)
    read(MODEL, clone, PROMPT + 40, 5)
    assert state.tables[0].read(0, 13).equal(before) and resident([cache, clone]) > held
    alone = MODEL.new_cache()
    alone.policy = Quest(0.3, dense_layers=0).state(MODEL, PROMPT)
    read(MODEL, alone, PROMPT)
    read(MODEL, alone, PROMPT + 40, 1)
    rows = [MODEL.forward(Batch([Segment.chunk(TOKENS[:3], each)])).logits for each in (clone, alone)]
    assert rows[0].shape == rows[1].shape


def test_scores_are_what_rows_pay() -> None:
    """The same however a prompt is cut, to the bit."""
    scores = []
    for size in (150, 64, 7):
        cache = MODEL.new_cache()
        cache.policy = state = H2O(1.0).state(MODEL, PROMPT + 1)
        assert isinstance(state, Evicting)
        read(MODEL, cache, PROMPT, size)
        scores.append(state._held[3].scores)
    assert np.allclose(scores[0].sum(axis=1), PROMPT, atol=1e-3)
    assert (scores[0] == scores[1]).all() and (scores[0] == scores[2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_kernels_move_up_what_lies_after_lost_slots(dtype: torch.dtype, count: int) -> None:
    model, draw = to_int8(RAW), np.random.default_rng(count)
    model.narrow_caches(dtype)
    cache = model.new_cache()
    read(model, cache, PROMPT)
    clone, other, whole = cache.fork(), cache.fork(), cache.data
    layers, heads = model.config.num_layers, model.config.num_kv_heads
    every = np.arange(PROMPT)
    lost = np.array([[np.sort(draw.permutation(PROMPT)[:count]) for _ in range(heads)] for _ in range(layers)])
    lost[1] = PROMPT + 5
    worths = draw.random((layers, heads, PROMPT + 3))
    kept = [np.array([np.setdiff1d(every, own) for own in each]) for each in lost]
    wanted = [np.take_along_axis(each[:, :PROMPT], own, axis=1) for each, own in zip(worths, kept, strict=True)]
    clone.lose(lost.astype(np.int32), worths)
    for layer, slots in enumerate(kept):
        cache.retain(layer, slots)
        assert clone.stored(layer).equal(cache.stored(layer))
        assert (clone.positions[layer, : slots.shape[1]] == cache.positions[layer, : slots.shape[1]]).all()
        assert (worths[layer, :, : slots.shape[1]] == wanted[layer]).all()
    assert (
        clone.lengths.tolist() == cache.lengths.tolist() == [PROMPT - count, PROMPT, *[PROMPT - count] * (layers - 2)]
    )
    assert clone.pages.held.size == cache.pages.held.size
    assert other.data.equal(whole)


def test_a_prompt_that_is_compressed_needs_its_policy_no_more() -> None:
    cache = MODEL.new_cache()
    cache.policy = state = SnapKV(0.3).state(MODEL, PROMPT)
    assert isinstance(state, AfterPrompt)
    early, late = Segment.chunk(TOKENS[:64], cache), Segment(np.arange(140, 150), TOKENS[140:150], cache=cache)
    assert not early.sparse and late.sparse
    read(MODEL, cache, PROMPT)
    assert not late.sparse
