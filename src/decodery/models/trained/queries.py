"""A model whose query projections are others, and its passes over a prompt that is read already, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ..cache.cache import KVCache
from ..config import Rope
from ..hooks import Hooks
from ..layer_plan import WHOLE, layer_steps
from ..torch.attention import attend
from ..torch.transformer import Transformer
from ..torch.weights import Dense


def queries_of(model: Transformer) -> list[torch.Tensor]:
    """Copies [heads * head_dim, hidden] of the query projections of all layers, to be trained."""
    rows = model.config.num_heads * model.config.head_dim
    return [_dense(layer.qkv).weight[:rows].detach().clone().requires_grad_() for layer in model.weights.layers]


def with_queries(model: Transformer, queries: Sequence[torch.Tensor]) -> Transformer:
    """The model with these query projections.

    It shares all other weights, and the one that is given stays as it is.
    """
    layers = []
    for layer, own in zip(model.weights.layers, queries, strict=True):
        qkv = _dense(layer.qkv)
        layers.append(replace(layer, qkv=Dense(torch.cat([own, qkv.weight[len(own) :]]), qkv.bias)))
    return Transformer(model.config, replace(model.weights, layers=layers))


def _dense(linear: object) -> Dense:
    assert isinstance(linear, Dense)
    return linear


class Span:
    """Rows of a prompt, scored again over the keys and values that were kept of it.

    Args:
        cache: Holds at least the rows up to `start + length`, at their own positions.
        recompute: The span's own keys and values are those of this pass, and only what stands before it is taken from
            the cache.
    """

    def __init__(self, model: Transformer, cache: KVCache, start: int, length: int, recompute: bool) -> None:
        self.model, self.start, self.recompute = model, start, recompute
        self.positions = np.arange(start, start + length)
        self.kept = [cache.view(layer) for layer in range(model.config.num_layers)]
        self._angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}

    def loss(self, adapted: Transformer, tokens: Sequence[int]) -> torch.Tensor:
        """Mean cross-entropy [] of what follows each row.

        Args:
            tokens: Of the whole prompt.
        """
        first, end = self.start, self.start + len(self.positions)
        ids = torch.tensor(list(tokens[first : end + 1]), dtype=torch.int64, device=adapted.device)
        run = layer_steps(WHOLE, adapted.config.num_layers)
        hidden = adapted.blocks(adapted.embed_tokens(ids[:-1]), self, run, Hooks.reading(()))
        return cross_entropy(adapted.head(hidden), ids[1:])

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.model.config.layer_rope(layer)
        if rope not in self._angles:
            cos, sin = self.model.angles(rope, self.positions)
            self._angles[rope] = cos[:, None].to(self.model.dtype), sin[:, None].to(self.model.dtype)
        return self._angles[rope]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        end, config = self.start + len(self.positions), self.model.config
        seen_keys, seen_values = (each[:, :end] for each in self.kept[layer])
        if self.recompute:
            seen_keys = torch.cat([seen_keys[:, : self.start], keys.transpose(0, 1)], dim=1)
            seen_values = torch.cat([seen_values[:, : self.start], values.transpose(0, 1)], dim=1)
        back = torch.from_numpy(self.positions[:, None] - np.arange(end)[None, :]).to(queries.device)
        window = config.window(layer)
        mask = (back >= 0) if window is None else (back >= 0) & (back < window)
        sinks = self.model.weights.layers[layer].sinks
        return attend(queries, seen_keys, seen_values, mask, config.attention_scale, config.attention_cap, sinks)
