"""What many caches keep of one pass: rows that move do so in one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .cache import KVCache
from .page_pool import SLOTS, TensorPool


def keep_together(caches: Sequence[KVCache], counts: np.ndarray, rows: np.ndarray) -> None:
    """`KVCache.keep` of caches that hold every position in all layers; `next_position` stays.

    Args:
        caches: Caches that share a pool, whose last pass gave all layers all rows.
        counts: [caches] how many rows after its content become content of each.
        rows: [sum of counts] their numbers in each, ascending, the first one among them.
    """
    firsts, of = np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)
    moved = {*of[rows != np.arange(len(rows)) - firsts[of]].tolist()}
    pages: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    for number, (cache, n) in enumerate(zip(caches, counts.tolist(), strict=True)):
        start = int(cache.lengths[0])
        if number in moved:
            kept = rows[firsts[number] : firsts[number] + n]
            first = int((kept == np.arange(n)).argmin())
            slots = start + np.stack((kept[first:], np.arange(first, n)))
            pages.append(cache.pages.table[:, :, slots // SLOTS])
            offsets.append(slots % SLOTS)
        position = start - cache.prefix
        cache.slot_positions.held[:, start : start + n] = np.arange(position, position + n)
        cache.lengths += n
        if cache.tentative:
            cache.tentative = cache.retained = 0
            cache.written[:] = 0
    if pages:
        pool = caches[0].pages.pool
        assert isinstance(pool, TensorPool)
        _move(pool, np.concatenate(pages, axis=3), np.concatenate(offsets, axis=1))


def _move(pool: TensorPool, pages: np.ndarray, offsets: np.ndarray) -> None:
    """Copy rows of pages [layers, kv_heads, 2 (from, to), n] at offsets [2, n], all read before any is written."""
    joined = np.concatenate((pages.reshape(-1), offsets.reshape(-1))).astype(np.int64)
    where, at = torch.from_numpy(joined).to(pool.device, non_blocking=True).split([pages.size, offsets.size])
    (source, target), (begin, end) = where.view(pages.shape).unbind(2), at.view(offsets.shape)
    with pool.still():
        pool.put(target, end, pool.rows(source, begin))
