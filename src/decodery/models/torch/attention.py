"""Attention of one segment's rows over its cache and over each other, in PyTorch."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ..batch import Segment
from ..cache.attention_policy import Attention, acting, reads, settle


class Rows(Protocol):
    """The rows of one pass, as every layer meets them."""

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all rows, each [N, 1, head_dim / 2]."""
        ...

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim] -> [N, hidden]."""
        ...


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn [N, heads, head_dim] by the rows' angles.

    Args:
        cos, sin: [N, 1, head_dim / 2].
    """
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def near(slots: np.ndarray, positions: np.ndarray, window: int) -> np.ndarray:
    """[n, m] bool, which slots at [m] lie in the window of rows at [n], see `ModelConfig.window`."""
    if window < 0:
        return np.asarray(slots[None, :] // -window == positions[:, None] // -window)
    return np.asarray(np.abs(slots[None, :] - positions[:, None]) < window)


def visibility(segment: Segment, layer: int, window: int | None) -> np.ndarray | None:
    """Which slots each row sees, [n, cached + retained + n] bool; None where every row sees all of them.

    [kv_heads, n, cached + retained + n] where some heads have lost some of the cached ones.
    """
    n, cache = len(segment), segment.cache
    cached = 0 if cache is None else int(cache.lengths[layer])
    own = segment.seen()
    lost = None if cache is None else cache.losses.of(layer, cached)
    if window is None:
        if own.all() and lost is None:
            return None
        seen = np.concatenate((np.ones((n, cached), dtype=bool), own), axis=1)
    else:
        slots = segment.positions if cache is None else cache.positions[layer, : cached + segment.retained + n]
        seen = near(slots, segment.positions, window)
        seen[:, cached:] &= own
    if lost is not None:
        seen = np.repeat(seen[None], len(lost), axis=0)
        seen[:, :, :cached] &= ~lost[:, None]
    return None if seen.all() else seen


def visible(segment: Segment, layer: int, window: int | None) -> np.ndarray:
    """`visibility`, written out where every row sees all slots."""
    seen = visibility(segment, layer, window)
    cached = 0 if segment.cache is None else int(segment.cache.lengths[layer])
    return np.ones((len(segment), cached + segment.retained + len(segment)), dtype=bool) if seen is None else seen


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """queries [n, heads, head_dim], keys and values [kv_heads, L, head_dim] -> [n, heads * head_dim].

    The query heads that share one key-value head are laid out as rows of that head, so nothing is repeated.

    Args:
        mask: [n, L] or [kv_heads, n, L].
        cap: Of scores, see `ModelConfig.attention_cap`.
        sinks: [heads] scores that have no value.
    """
    n, heads, dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    rows = queries.view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, dim)
    if mask is not None:
        mask = mask.repeat(group, 1) if mask.ndim == 2 else mask.repeat(1, group, 1)[None]
    if cap or sinks is not None:
        scores = capped(rows @ keys[None].transpose(-1, -2) * scale, cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        result = shares(scores, sinks) @ values[None]
        return result.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)
    result = scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, scale=scale)
    return result.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), or x where the cap is 0."""
    return scores if cap == 0.0 else torch.tanh(scores / cap) * cap


def shares(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores [..., kv_heads, group * n, L] beside sinks [heads], whose own part is left out."""
    if sinks is None:
        return scores.softmax(dim=-1)
    heads, rows = scores.shape[-3:-1]
    own = sinks.view(heads, -1).repeat_interleave(heads * rows // len(sinks), dim=1).to(scores.dtype)
    both = torch.cat((scores, own.expand(scores.shape[:-1])[..., None]), dim=-1)
    return both.softmax(dim=-1)[..., :-1]


def attend_by_policy(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    layer: int,
    window: int | None,
    cap: float = 0.0,
) -> torch.Tensor:
    """`attend` of what the policy of a segment's cache selects, where there is one.

    Queries are scaled already.
    """
    assert segment.cache is not None
    policy, (n, heads, dim), kv_heads = acting(segment, window), queries.shape, len(keys)
    attention = Attention(layer, segment, queries, keys, values, visible(segment, layer, window), segment.bias(layer))
    chosen = None if policy is None else policy.select(attention)
    read = torch.from_numpy(reads(chosen, attention, kv_heads)).to(queries.device)
    grouped = queries.view(n, kv_heads, heads // kv_heads, dim)
    scores = capped(torch.einsum("nkgd,ksd->kgns", grouped, keys), cap).masked_fill(~read[:, None], -torch.inf)
    attention.mass = scores.logsumexp(dim=-1).permute(2, 0, 1).reshape(n, heads)
    weights = scores.softmax(dim=-1)
    attention.weights = weights.flatten(0, 1)
    attention.context = torch.einsum("kgns,ksd->nkgd", weights, values).reshape(n, heads, dim)
    return settle(policy, attention).reshape(n, heads * dim)
