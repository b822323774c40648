"""Attention of heads that are unrolled along known texts, for training."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch

from .parts import DecoderLayer


def teacher_attention(
    layer: DecoderLayer, queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Attention of a step of an unrolled head, for texts side by side.

    [b, n, heads, head_dim] -> [b, n, width]. A query sees those of step 0 up to its own place, and of later steps those
    of its own place alone, as a tree's rows see the text and the path above them.

    Args:
        keys, values: Of all steps so far [b, n, kv_heads, head_dim].
    """
    shape = layer.shape
    b, n, heads, dim = queries.shape
    group = heads // shape.kv_heads
    grouped = queries.view(b, n, shape.kv_heads, group, dim)
    scores = torch.einsum("bqkgd,bskd->bkgqs", grouped, keys[0]) * layer.scale
    places = torch.arange(n, device=queries.device)
    hidden = places[None, :] > places[:, None]
    if shape.window is not None:
        hidden |= places[None, :] < places[:, None] - shape.window
    if shape.sliding is not None:
        hidden |= places[None, :] <= places[:, None] + len(keys) - 1 - shape.sliding
    scores = scores.masked_fill(hidden, -torch.inf)
    first = 1 if shape.sliding is None else max(1, len(keys) - shape.sliding)
    own = [torch.einsum("bqkgd,bqkd->bkgq", grouped, each)[..., None] * layer.scale for each in keys[first:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
    found = torch.einsum("bkgqs,bskd->bqkgd", weights[..., :n], values[0])
    for step, each in enumerate(values[first:]):
        found = found + torch.einsum("bkgq,bqkd->bqkgd", weights[..., n + step], each)
    return found.reshape(b, n, heads * dim)


def block_attention(
    layer: DecoderLayer,
    queries: torch.Tensor,
    text: Ordered[torch.Tensor],
    own: Ordered[torch.Tensor],
    near: torch.Tensor,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of blocks in texts side by side: [b, m, block, heads, head_dim] -> [b, m, block, width].

    Args:
        text: Keys and values of the texts [b, n, kv_heads, head_dim].
        own: Those of the blocks [b, m, block, kv_heads, head_dim].
        near: [m, block, n] what rows see of a text.
        seen: [block, block] what they see of their block; None: all.
    """
    (b, m, size, heads, dim), kv_heads, n = queries.shape, text[0].shape[2], text[0].shape[1]
    grouped = queries.view(b, m, size, kv_heads, heads // kv_heads, dim) * layer.scale
    far = torch.einsum("bnskgd,btkd->bnkgst", grouped, text[0])
    far = far.masked_fill(~near[None, :, None, None].to(far.device), -torch.inf)
    close = torch.einsum("bnskgd,bntkd->bnkgst", grouped, own[0])
    if seen is not None:
        close = close.masked_fill(~seen.to(close.device), -torch.inf)
    weights = torch.cat((far, close), dim=-1).softmax(dim=-1)
    found = torch.einsum("bnkgst,btkd->bnskgd", weights[..., :n], text[1])
    found = found + torch.einsum("bnkgst,bntkd->bnskgd", weights[..., n:], own[1])
    return found.reshape(b, m, size, heads * dim)
