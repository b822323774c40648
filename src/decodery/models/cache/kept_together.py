"""What many caches keep of one pass: rows that move do so in one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .cache import KVCache
from .page_pool import SLOTS, TensorPool


def keep_together(caches: Sequence[KVCache], rows: Sequence[np.ndarray]) -> None:
    """`KVCache.keep` of caches that hold the same slots in all layers; `next_position` stays.

    Args:
        caches: Caches that share a pool, whose last pass gave all layers all rows.
        rows: Of each, its tentative rows that become content, ascending, the first one among them.
    """
    pages: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    for cache, kept in zip(caches, rows, strict=True):
        start, n = int(cache.lengths[0]), len(kept)
        if kept[-1] != n - 1:
            first = int((kept == np.arange(n)).argmin())
            slots = start + np.stack((kept[first:], np.arange(first, n)))
            pages.append(cache.pages.table[:, :, slots // SLOTS])
            offsets.append(slots % SLOTS)
            cache.slot_positions.gather(list(range(len(cache.lengths))), start, kept)
        cache.lengths += n
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
