"""Pages: none is lost, none is held twice, and what a head loses goes back."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from decodery.core.errors import OutOfMemory
from decodery.models.cache import coded, page_pool
from decodery.models.cache.account import resident
from decodery.models.cache.cache import KVCache
from decodery.models.cache.memory_limit import MemoryLimit
from decodery.models.cache.page_pool import SLOTS, MappedPool, PagePool, TensorPool, page_bytes
from decodery.models.cache.pages import PageTable
from far import Devices, Watched

ROW = 8


def pool(kind: type[PagePool], pages: int) -> PagePool:
    return kind(ROW, torch.float32, torch.device("cpu"), pages * page_bytes(ROW, torch.float32))


@pytest.mark.parametrize("kind", [MappedPool, TensorPool])
def test_random_traffic_never_holds_more_than_there_is(kind: type[PagePool]) -> None:
    chance, limit, refused = random.Random(1), 40, 0
    one = pool(kind, limit)
    texts: list[np.ndarray] = []
    for _ in range(400):
        match chance.randrange(3):
            case 0:
                count = chance.randrange(1, 12)
                held = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *texts]))
                try:
                    texts.append(one.take(count))
                except OutOfMemory:
                    refused += 1
                    assert len(held) + count > limit
                else:
                    assert not set(texts[-1].tolist()) & set(held.tolist())
            case 1 if texts:
                one.share(shared := chance.choice(texts))
                texts.append(shared)
            case 2 if texts:
                one.drop(texts.pop(chance.randrange(len(texts))))
        held = np.concatenate([np.zeros(0, dtype=np.int32), *texts])
        assert one.used == len(np.unique(held)) <= limit
        assert (np.bincount(held, minlength=limit) == one.holders).all()
    assert refused
    for each in texts:
        one.drop(each)
    assert one.used == 0 and len(one.take(limit)) == limit


@pytest.mark.parametrize("kind", [MappedPool, TensorPool])
def test_rows_are_read_where_they_were_written(kind: type[PagePool]) -> None:
    table = PageTable((2, 3, ROW), torch.float32, "cpu")
    table.pool = pool(kind, 64)
    table.own(np.array([0, 0]), np.array([50, 20]))
    rows = torch.randn(2, 2, 3, 50, ROW, generator=torch.Generator().manual_seed(0))
    table.put(0, rows)
    assert table.read(0, 50)[0].equal(rows[0]) and table.read(0, 32)[1].equal(rows[1, :, :, :32])
    assert not table.read(32, 50)[1].any(), "there is no page"
    some = np.array([3, 17, 49])
    assert table.take(some, [0]).equal(rows[:1, :, :, some])
    assert table.take(some, [0], 2).equal(rows[:1, :, 2:, some])


@pytest.mark.parametrize("dtype", [torch.float32, coded.DTYPE])
def test_rows_that_move_lie_where_they_are_to_and_are_brought_by_one_copy(dtype: torch.dtype) -> None:
    slots, to, layers = np.array([19, 21, 40, 33]), 17, [0, 2]
    with Watched() as watched:
        table = PageTable((3, 2, ROW), dtype, "meta:0")
        table.own(np.zeros(3, dtype=np.int64), np.full(3, 48))
        rows = torch.randint(0, 100, (3, 2, 2, 48, ROW)).to(dtype)
        table.put(0, rows.to("meta:0"))
        before = watched.uploads
        table.move(slots, to, layers)
        assert watched.uploads == before + 1
        found = table.read(0, 48).to("cpu")
    rows[layers, ..., to : to + len(slots), :] = rows[layers][..., slots, :]
    assert torch.equal(found, rows)


def test_a_head_that_loses_slots_gives_its_pages_back() -> None:
    cache = KVCache(2, 2, ROW)
    rows = torch.randn(2, 2, 80, 2, ROW, generator=torch.Generator().manual_seed(0))
    cache.reserve(np.arange(80))
    for layer in range(2):
        cache.write(layer, *rows[layer])
    cache.keep(range(80))
    clone, whole = cache.fork(), cache.bytes
    cache.evict(1, range(4, 60), [0])
    one = cache.pages.pool.page_bytes
    assert cache.bytes == whole - 3 * one and cache.head_lengths.tolist() == [[80, 80], [24, 80]]
    # The fork has what it had, and the pages that were written over are its own.
    assert clone.view(1)[0].equal(rows[1, 0].transpose(0, 1)) and resident([cache, clone]) == whole + 2 * one
    keys, left = cache.view(1)[0], [*range(4), *range(60, 80)]
    assert keys[0, left].equal(rows[1, 0, left, 0]) and keys[1].equal(rows[1, 0, :, 1])
    # Rows after it are told from those that are lost, and so are those that are kept out of order.
    more = torch.randn(3, 2, ROW, generator=torch.Generator().manual_seed(1))
    cache.reserve(np.array([80, 81, 81]))
    for layer in range(2):
        cache.write(layer, more, more)
    cache.keep([0, 2])
    assert cache.view(1)[1][:, 80:].equal(more[[0, 2]].transpose(0, 1))
    cache.truncate(70)
    assert cache.head_lengths.tolist() == [[70, 70], [14, 70]] and SLOTS == 16
    assert cache.view(1)[0][0, 60:70].equal(rows[1, 0, 60:70, 0])


def grown(limit: MemoryLimit) -> KVCache:
    """A text of 400 rows that come a few at a time."""
    with limit.within():
        cache = KVCache(2, 2, ROW)
    for start in range(0, 400, 5):
        cache.reserve(np.arange(start, start + 5))
        for layer in range(2):
            cache.write(layer, *torch.zeros(2, 5, 2, ROW, dtype=torch.float32, device="cpu"))
        cache.keep(range(5))
    return cache


@pytest.mark.parametrize("kind", [MappedPool, TensorPool])
def test_what_grows_takes_at_most_what_it_holds(kind: type[PagePool], request: pytest.FixtureRequest) -> None:
    if kind is TensorPool:
        request.getfixturevalue("pools_of_pytorch")
    limit = MemoryLimit(1 << 24)
    cache = grown(limit)
    assert isinstance(cache.pages.pool, kind) and cache.pages.pool.generation == 0, "nothing was copied"
    assert limit.peak == limit.used == cache.bytes == 400 * cache.slot_bytes
    with pytest.raises(OutOfMemory, match="no memory for a key-value cache of 385 tokens"):
        grown(MemoryLimit(limit.peak - 1))
    del cache
    assert limit.used == 0


def test_pools_on_a_device_grow_by_halves_and_take_no_limit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "_FIRST", 4 * page_bytes(ROW, torch.float32))
    limit = MemoryLimit(4000 * page_bytes(ROW, torch.float32))
    with Devices(), limit.within():
        one, other = (TensorPool(ROW, torch.float32, torch.device("meta:0"), limit.most) for _ in range(2))
        limit.pools["other"] = other
        other.take(2)
        for _ in range(600):
            one.take(1)
        assert other.data.shape[1] == 4 and 600 <= one.data.shape[1] <= 900
        # 4 times 1.5^13 are more than 600.
        assert one.generation <= 14
        one.take(200)
        assert one.data.shape[1] == 3996, "the limit, but for what the other pool has"
        limit.pools["one"] = one
        before = other.generation
        for _ in range(100):
            other.take(1)
        assert other.generation < before + 12, "what the other pool left is nothing, and it moves by halves even so"


@pytest.mark.parametrize("room", [5500, 3400])
def test_pools_on_a_device_reach_what_fits(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 4,000 pages on a device that has so much room for what is held and what it moves to."""
    monkeypatch.setattr(page_pool, "_FIRST", 4 * page_bytes(ROW, torch.float32))
    limit = MemoryLimit(4000 * page_bytes(ROW, torch.float32))
    with Devices(), limit.within():
        pool = TensorPool(ROW, torch.float32, torch.device("meta:0"), limit.most)
        zeros = pool._zeros

        def bounded(pages: int) -> torch.Tensor:
            if pool.data.shape[1] + pages > room:
                raise OutOfMemory("none")
            return zeros(pages)

        monkeypatch.setattr(pool, "_zeros", bounded)
        with suppress(OutOfMemory):
            for _ in range(4000):
                pool.take(1)
        # Without room for all of it, up to half of what there is: the rest is where it moves from.
        assert pool.used == (4000 if room > 5000 else pool.data.shape[1]) and pool.used >= room * 2 // 5
        assert pool.generation <= 40


def test_pools_of_one_limit_share_it() -> None:
    limit = MemoryLimit(6 * page_bytes(ROW, torch.float32))
    with limit.within():
        one, other = PageTable((1, 1, ROW), torch.float32, "cpu"), PageTable((1, 1, 2 * ROW), torch.float32, "cpu")
    apart = PageTable((1, 1, ROW), torch.float32, "cpu")
    one.own(np.array([0]), np.array([4 * SLOTS]))
    apart.own(np.array([0]), np.array([40 * SLOTS]))
    assert page_bytes(2 * ROW, torch.float32) == page_bytes(ROW, torch.float32), "rows of 8 are padded to 16"
    other.own(np.array([0]), np.array([2 * SLOTS]))
    with pytest.raises(OutOfMemory):
        other.own(np.array([0]), np.array([3 * SLOTS]))
    one.trim(np.array([2 * SLOTS]))
    other.own(np.array([0]), np.array([4 * SLOTS]))
    assert limit.used == limit.peak == limit.most
