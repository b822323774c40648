"""Forks share pages and copy those they write; memory comes back, and a failure leaves caches as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decodery.core.errors import OutOfMemory
from decodery.models.batch import Batch, Segment
from decodery.models.cache.account import resident
from decodery.models.cache.cache import KVCache
from decodery.models.cache.page_pool import SLOTS
from decodery.testing import tiny_transformer

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


def append(cache: KVCache, tokens: list[int]) -> None:
    MODEL.forward(Batch([Segment.chunk(tokens, cache, logit_rows=[])]))
    cache.keep(range(len(tokens)))


def test_forks_share_all_pages_but_those_they_write() -> None:
    text = [token % 64 for token in range(100)]
    cache, whole = filled(text), 100 // SLOTS
    clone = cache.fork()
    assert (clone.pages.table == cache.pages.table).all() and resident([cache, clone]) == cache.bytes
    append(cache, [1, 2])
    append(clone, [3])
    assert resident([cache, clone]) == cache.bytes + SLOTS * cache.slot_bytes
    assert (clone.pages.table == cache.pages.table).all(axis=(0, 1)).tolist() == [True] * whole + [False]
    assert difference(cache, filled([*text, 1, 2])) < 1e-12 and difference(clone, filled([*text, 3])) < 1e-12
    # What a fork may see, the first one must not write over either.
    third = cache.fork()
    cache.truncate(70)
    append(cache, [9])
    assert difference(third, filled([*text, 1, 2])) < 1e-12
    assert difference(cache, filled([*text[:70], 9])) < 1e-12


def test_pages_nobody_else_holds_are_written_in_place() -> None:
    cache = filled([1, 2, 3])
    clone, held = cache.fork(), cache.pages.table.copy()
    del cache
    append(clone, list(range(60)))
    assert (clone.pages.table[:, :, :1] == held).all() and clone.bytes == 64 * clone.slot_bytes
    other, held = clone.fork(), clone.pages.table.copy()
    del other
    clone.truncate(0)
    append(clone, [5])
    assert (clone.pages.table == held).all()


def test_many_forks_of_a_long_text_hold_little_more_than_one() -> None:
    cache = KVCache(2, 2, 8)
    cache.reserve(np.arange(4000))
    cache.wrote([0, 1])
    cache.keep(range(4000))
    one, forks = cache.bytes, [cache.fork() for _ in range(64)]
    for fork in forks:
        for position in range(4000, 4016):
            fork.reserve(np.array([position]))
            fork.write(0, torch.full((1, 2, 8), position), torch.zeros(1, 2, 8))
            fork.wrote([1])
            fork.keep([0])
    assert resident([cache, *forks]) == one + 64 * SLOTS * cache.slot_bytes
    assert forks[0].data[0, 0, 0, 4000:4016, 0].tolist() == list(range(4000, 4016))
    # A fork that goes on takes a page when it comes to it.
    long = forks[0]
    for position in range(4016, 4400):
        long.reserve(np.array([position]))
        long.write(0, torch.full((1, 2, 8), position), torch.zeros(1, 2, 8))
        long.wrote([1])
        long.keep([0])
        pages = -(-(position + 1 - 4016) // SLOTS)
        assert resident([cache, *forks]) == one + (64 + pages) * SLOTS * cache.slot_bytes
    assert long.data[0, 0, 0, 3990:4400, 0].tolist()[10:] == list(range(4000, 4400))


def test_pages_come_back_when_texts_end() -> None:
    pool = filled([1]).pages.pool
    before, family = pool.used, [filled(list(range(40)))]
    family += [family[0].fork() for _ in range(3)]
    append(family[2], [1, 2])
    assert pool.used * pool.page_bytes == before * pool.page_bytes + resident(family)
    family[2].evict(1, range(20))
    assert pool.used * pool.page_bytes == before * pool.page_bytes + resident(family)
    family.clear()
    assert pool.used == before


def test_an_evicted_fork_leaves_the_others_alone() -> None:
    text = [token % 64 for token in range(40)]
    cache = filled(text)
    clone = cache.fork()
    clone.evict(1, range(3, 30))
    assert clone.lengths.tolist() == [40, 13]
    assert torch.equal(clone.data[1, :, :, 3:13], cache.data[1, :, :, 30:40])
    assert torch.equal(clone.data[0, :, :, :40], cache.data[0, :, :, :40])
    assert difference(cache, filled(text)) < 1e-12


def test_no_memory_for_one_cache_leaves_it_and_its_forks_as_they_were() -> None:
    cache = filled([1, 2, 3])
    clone = cache.fork()
    with pytest.raises(OutOfMemory):
        clone.provide(2**45)
    assert resident([cache, clone]) == cache.bytes
    append(clone, [4])
    assert difference(clone, filled([1, 2, 3, 4])) < 1e-12 and difference(cache, filled([1, 2, 3])) < 1e-12
