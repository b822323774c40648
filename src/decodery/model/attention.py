"""Attention of one segment's rows over its cache and over each other, in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from .batch import Segment


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn [N, heads, head_dim] by the rows' angles; cos and sin: [N, 1, head_dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def visibility(segment: Segment, layer: int, window: int | None) -> np.ndarray | None:
    """Which slots each row sees, [n, cached + stays + n] bool; None where every row sees all of them."""
    n = len(segment)
    cached = 0 if segment.cache is None else int(segment.cache.lengths[layer])
    own = segment.seen()
    if window is None:
        if own.all():
            return None
        return np.concatenate((np.ones((n, cached), dtype=bool), own), axis=1)
    if segment.cache is None:
        slots = segment.positions
    else:
        slots = segment.cache.positions[layer, : cached + segment.stays + n]
    near = np.abs(slots[None, :] - segment.positions[:, None]) < window
    near[:, cached:] &= own
    return None if near.all() else near


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """queries [n, heads, head_dim], keys and values [kv_heads, L, head_dim], mask [n, L] -> [n, heads * head_dim].

    The query heads that share one key-value head are laid out as rows of that head, so nothing is repeated.
    """
    n, heads, dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    rows = queries.view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, dim)
    if mask is not None:
        mask = mask.repeat(group, 1)
    result = scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, scale=scale)
    return result.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)
