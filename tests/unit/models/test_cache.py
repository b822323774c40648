"""The cache's laws: whatever is kept, cut, forked or evicted, it holds what a fresh pass would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decodery.core.errors import OutOfMemory
from decodery.models.batch import Batch, Segment
from decodery.models.cache.cache import KVCache, Snapshot
from decodery.models.cache.page_pool import SLOTS
from decodery.models.layer_plan import LayerPlan
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.testing import LawBroken, TableModel, check_cache, tiny_transformer

MODEL = tiny_transformer(3)


def filled(tokens: list[int], capacity: int = 0) -> KVCache:
    cache = KVCache(2, 2, 8, dtype=torch.float64, capacity=capacity)
    if tokens:
        MODEL.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
        cache.keep(range(len(tokens)))
    return cache


def difference(left: KVCache, right: KVCache) -> float:
    n = left.length
    assert n == right.length and left.next_position == right.next_position
    assert (left.positions[:, :n] == right.positions[:, :n]).all()
    return float((left.data[:, :, :, :n] - right.data[:, :, :, :n]).abs().max()) if n else 0.0


class CacheMachine(RuleBasedStateMachine):
    """Random sequences of passes and cuts over a family of forks, each beside the tokens it should hold."""

    @initialize(tokens=st.lists(st.integers(0, 63), min_size=1, max_size=5), capacity=st.integers(1, 8))
    def begin(self, tokens: list[int], capacity: int) -> None:
        self.held = [(filled(tokens, capacity), list(tokens))]

    @precondition(lambda self: sum(len(tokens) for _, tokens in self.held) < 200)
    @rule(data=st.data())
    def score_a_tree_and_keep_a_path(self, data: st.DataObject) -> None:
        cache, tokens = data.draw(st.sampled_from(self.held))
        n = data.draw(st.integers(1, 8))
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(n)]
        ids = data.draw(st.lists(st.integers(0, 63), min_size=n, max_size=n))
        mask, depths = np.zeros((n, n), dtype=bool), np.zeros(n, dtype=np.int64)
        for node, parent in enumerate(parents):
            mask[node, node] = True
            if parent >= 0:
                mask[node] |= mask[parent]
                depths[node] = depths[parent] + 1
        positions = cache.next_position + depths
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set()))), n]
        for retained, stop in itertools.pairwise(cuts):
            if retained and data.draw(st.booleans()):  # a pass whose rows do not stay leaves no trace
                others = Segment(positions[:3], np.zeros(3, int)[:n], cache=cache, retained=retained)
                MODEL.forward(Batch([others]))
            rows = slice(retained, stop)
            new = Segment(positions[rows], np.array(ids)[rows], mask=mask[rows, :stop], cache=cache, retained=retained)
            MODEL.forward(Batch([new]))
        leaf = data.draw(st.integers(-1, n - 1))
        path = [] if leaf < 0 else np.flatnonzero(mask[leaf]).tolist()
        cache.keep(path)
        tokens += [ids[node] for node in path]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache, tokens = data.draw(st.sampled_from(self.held))
        n = data.draw(st.integers(0, len(tokens)))
        cache.truncate(n)
        del tokens[n:]

    @precondition(lambda self: len(self.held) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, tokens = data.draw(st.sampled_from(self.held))
        self.held.append((cache.fork(), list(tokens)))

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @invariant()
    def every_cache_equals_a_fresh_prefill(self) -> None:
        for cache, tokens in getattr(self, "held", []):
            assert cache.length == len(tokens)
            assert difference(cache, filled(tokens)) < 1e-12


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=10, deadline=None)


def test_a_layer_that_did_not_run_keeps_nothing() -> None:
    """Its slots hold whatever memory held before; whether that is a number or not, nobody may see it."""
    cache = filled([1, 2, 3])
    cache.pages.put(3, torch.full((2, 2, 2, 13, 8), torch.nan, dtype=torch.float64))
    MODEL.forward(Batch([Segment.chunk([4, 5], cache)]), layer_plan=LayerPlan((0,)))
    cache.keep([0, 1])
    assert cache.lengths.tolist() == [5, 3] and cache.next_position == 5
    assert MODEL.forward(Batch([Segment.chunk([6], cache)])).logits.isfinite().all()
    cache.keep([0])
    assert cache.lengths.tolist() == [6, 4] and cache.positions[1, :4].tolist() == [0, 1, 2, 5]
    cache.truncate(4)
    assert cache.lengths.tolist() == [4, 3]


def test_layers_may_keep_rows_and_others_not() -> None:
    cache = filled([1, 2, 3])
    MODEL.forward(Batch([Segment.chunk([4, 5, 6], cache)]))
    cache.keep([0, 1], layers=[1])
    assert cache.lengths.tolist() == [3, 5] and cache.next_position == 5
    MODEL.forward(Batch([Segment.chunk([7], cache)]), layer_plan=LayerPlan((0,)))
    with pytest.raises(IndexError, match="not all among the 0 tentative rows"):
        cache.keep([0], layers=[0, 1])
    with pytest.raises(IndexError, match="1 rows cannot stay where there are 0"):
        MODEL.forward(Batch([Segment(np.array([6]), np.array([8]), cache=cache, retained=1)]))


def test_a_pass_that_failed_leaves_no_rows() -> None:
    cache = filled([1, 2])
    with pytest.raises(IndexError):
        MODEL.forward(Batch([Segment.chunk([3, MODEL.vocab_size], cache)]))
    with pytest.raises(IndexError, match="not all among"):
        cache.keep([0])


def test_what_is_kept_ascends() -> None:
    """Cutting looks for a position among ascending ones."""
    cache = filled([1, 2])
    siblings = Segment(np.array([2, 3, 3]), np.array([4, 5, 6]), cache=cache)
    MODEL.forward(Batch([siblings]))
    for rows in ([1, 0], [0, 0], [0, 1, 2]):
        with pytest.raises(IndexError, match="do not ascend from 2 on"):
            cache.keep(rows)
    cache.keep([0, 2])
    MODEL.forward(Batch([Segment(np.array([3]), np.array([7]), cache=cache)]))
    with pytest.raises(IndexError, match="do not ascend from 4 on"):
        cache.keep([0])


def test_a_mark_is_returned_to_as_long_as_what_it_marks_is_there() -> None:
    cache = filled([1, 2, 3])
    snapshot = cache.snapshot()
    clone = cache.fork()
    for each in (cache, clone):
        MODEL.forward(Batch([Segment.chunk([4, 5], each)]))
        each.keep([0, 1])
        later = each.snapshot()
        MODEL.forward(Batch([Segment.chunk([6], each)]))
        each.restore(snapshot)
        assert difference(each, filled([1, 2, 3])) < 1e-12
        with pytest.raises(ValueError, match="cut or evicted"):
            each.restore(later)
        with pytest.raises(IndexError):
            each.keep([0])
    cache.evict(0, [1])
    clone.truncate(2)
    for each in (cache, clone):
        with pytest.raises(ValueError, match="cut or evicted"):
            each.restore(snapshot)


@given(st.lists(st.integers(0, 9), unique=True, max_size=9), st.lists(st.integers(0, 9), unique=True, max_size=9))
@settings(max_examples=30, deadline=None)
def test_eviction_equals_a_mask_over_the_dropped_slots(first: list[int], second: list[int]) -> None:
    """Dropping slots of a layer gives what hiding them from its rows would give."""
    tokens = list(range(20, 30))
    cache = filled(tokens)
    before = cache.data[:, :, :, :10].clone()
    cache.evict(0, first)
    cache.evict(1, second)
    for layer, slots in enumerate((first, second)):
        left = [slot for slot in range(10) if slot not in slots]
        assert cache.positions[layer, : cache.lengths[layer]].tolist() == left
        assert torch.equal(cache.data[layer, :, :, : len(left)], before[layer][:, :, left])
    # The next rows stand at position 10 whatever was dropped, and see just what is left.
    step = Segment.chunk([5, 6], cache)
    MODEL.forward(Batch([step]))
    cache.keep([0, 1])
    assert cache.next_position == 12
    cache.truncate(11)
    assert [int(length) for length in cache.lengths] == [11 - len(first), 11 - len(second)]


@pytest.mark.parametrize("make", [tiny_transformer, TableModel])
def test_rows_that_stay_are_seen_as_if_fed_again(make: Callable[[], LanguageModel]) -> None:
    """A tree that grows over three passes, the last one causal, scores as the same tree in one pass does."""
    model, parents, positions = make(), [-1, 0, 0, 2], np.array([2, 3, 3, 4, 5, 6])
    mask = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    mask[4:] = np.tri(2, 6, 4, dtype=bool)  # a chain that sees every row before it
    ids = np.arange(6) % model.vocab_size
    whole, grown = model.new_cache(), model.new_cache()
    for cache in (whole, grown):
        model.forward(Batch([Segment.chunk([1, 2], cache)]))
        cache.keep([0, 1])
    expected = model.forward(Batch([Segment(positions, ids, mask=mask, cache=whole)])).logits
    # Room for one row more than there is at first, so that rows which stay are moved.
    grown.provide(4)
    rows = []
    for retained, stop in ((0, 1), (1, 4), (4, 6)):
        new = slice(retained, stop)
        seen = None if stop == 6 else mask[new, :stop]
        rows.append(
            model.forward(Batch([Segment(positions[new], ids[new], mask=seen, cache=grown, retained=retained)])).logits
        )
    assert (torch.cat(rows) - expected).abs().max() < 1e-12
    for cache in (whole, grown):
        cache.keep([0, 2, 3])
    assert difference(whole, grown) < 1e-12


def test_no_more_rows_can_stay_than_there_are() -> None:
    cache = filled([1, 2])
    MODEL.forward(Batch([Segment.chunk([3, 4], cache)]))
    with pytest.raises(IndexError, match="3 rows cannot stay where there are 2"):
        MODEL.forward(Batch([Segment(np.array([4]), np.array([1]), cache=cache, retained=3)]))
    with pytest.raises(ValueError, match="only in a cache"):
        MODEL.forward(Batch([Segment(np.array([4]), np.array([1]), retained=1)]))
    with pytest.raises(ValueError, match=r"is \(1, 3\), not \(1, 1\)"):
        MODEL.forward(
            Batch([Segment(np.array([4]), np.array([1]), mask=np.ones((1, 1), bool), cache=cache, retained=2)])
        )


def test_growing_copies_nothing() -> None:
    """A text takes a page of each layer and head when it comes to it, and keeps those that it has."""
    cache, held = filled([1]), np.zeros((2, 2, 0), dtype=np.int32)
    for token in range(200):
        append(cache, [token % 64])
        assert (cache.pages.table[:, :, : held.shape[2]] == held).all()
        held = cache.pages.table.copy()
        assert held.shape[2] == -(-cache.length // SLOTS) and cache.bytes == held.size * cache.pages.pool.page_bytes


def append(cache: KVCache, tokens: list[int]) -> None:
    MODEL.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
    cache.keep(range(len(tokens)))


def test_rows_outside_the_last_pass_cannot_be_kept() -> None:
    cache = filled([1, 2])
    with pytest.raises(IndexError, match="not all among the 0 tentative rows"):
        cache.keep([0])


def test_no_memory_for_a_larger_cache_is_one_clear_error() -> None:
    with pytest.raises(OutOfMemory, match=r"no memory for a key-value cache of \d+ tokens"):
        KVCache(64, 64, 256, dtype=torch.float64, capacity=2**40).reserve(np.arange(1))


def test_room_is_provided_to_the_page() -> None:
    cache = KVCache(2, 2, 8, dtype=torch.float64)
    assert cache.data.nbytes == 0
    cache.provide(40)
    cache.reserve(np.arange(3))
    cache.wrote([0, 1])
    cache.keep(range(3))
    assert (cache.capacity, cache.bytes) == (48, 48 * cache.slot_bytes)
    cache.pages.put(0, torch.full((2, 2, 2, 3, 8), 7.0, dtype=torch.float64))
    clone = cache.fork()
    clone.provide(17)
    assert (clone.capacity, cache.capacity) == (32, 48) and bool((clone.data[..., :3, :] == 7.0).all())
    clone.provide(2)
    assert clone.capacity == 16


class Forgetful(KVCache):
    """Rewinding cuts the first layer alone."""

    def restore(self, snapshot: Snapshot) -> None:
        lengths = self.lengths.copy()
        super().restore(snapshot)
        self.lengths[1:] = lengths[1:]


class Careless(KVCache):
    """Forks write to what they share."""

    def fork(self) -> Self:
        clone = super().fork()
        clone.store = self.store
        return clone


class Shallow(KVCache):
    """Rows that enter an upper layer take what the lower ones were given with them."""

    def reserve(self, positions: np.ndarray, retained: int = 0, layers: Sequence[int] | None = None) -> None:
        super().reserve(positions, retained)


def with_caches(kind: type[KVCache]) -> Transformer:
    model = tiny_transformer(3)
    model.new_cache = lambda: kind(2, 2, 8, dtype=torch.float64, capacity=4)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("make", [tiny_transformer, TableModel, lambda: with_caches(KVCache)])
def test_every_cache_obeys_the_law(make: Callable[[], LanguageModel]) -> None:
    assert check_cache(make()) < 1e-9


@pytest.mark.parametrize("kind", [Forgetful, Careless, Shallow])
def test_broken_caches_are_found(kind: type[KVCache]) -> None:
    with pytest.raises((LawBroken, IndexError)):
        check_cache(with_caches(kind))
