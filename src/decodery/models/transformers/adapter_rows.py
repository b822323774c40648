"""Models of `transformers` whose keys and values are rows of a `KVCache`, one per token and layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from decodery.core.errors import UnsupportedModel

from ..batch import Segment
from ..cache.cache import KVCache
from ..hooks import Hooks
from ..torch.attention import visibility
from .adapter_call import INSTEAD, ModelCalls
from .adapter_shapes import CACHE_NAMES, read_shapes


class RowMemory:
    """Keys and values of every token lie in a `KVCache`; the model is given positions and a mask.

    Layers may differ in heads and widths, and keys may be wider than values: such rows are stored as one head of the
    widest.

    Args:
        calls: The model.
        windowed: See `read_shapes`.

    Attributes:
        trees: Whether rows of a pass may branch.
        copies: How many times a model that repeats keys and values for all heads holds each.

    Raises:
        UnsupportedModel: If the model keeps anything else, or takes no positions or no cache.
    """

    chains = True
    keeps = "keys and values"

    def __init__(self, calls: ModelCalls, *, windowed: bool = True) -> None:
        self.calls = calls
        if getattr(calls.hf_model.config, "_attn_implementation", "eager") not in ("sdpa", "eager"):
            raise UnsupportedModel(
                f"{calls.name} does not take masks for its rows: load it with attn_implementation='sdpa'"
            )
        self._argument = next((name for name in CACHE_NAMES if name in calls.accepts), None)
        if "position_ids" not in calls.accepts or self._argument is None:
            raise UnsupportedModel(f"{calls.name} takes no position ids or no cache: {INSTEAD}")
        shapes = read_shapes(calls.hf_model, windowed=windowed)
        self.config, self.chunk = shapes.config, shapes.chunk
        self._kinds, self._rows = shapes.kinds, shapes.rows
        self.copies = 1 + self.config.num_heads // min(heads for (heads, _), _ in shapes.rows)
        self.trees = False

    def new_cache(self) -> KVCache:
        config, calls = self.config, self.calls
        return KVCache(config.num_layers, config.num_kv_heads, config.head_dim, dtype=calls.dtype, device=calls.device)

    @torch.no_grad()
    def run(self, segment: Segment, hooks: Hooks | None = None) -> torch.Tensor:
        """Logits [m, vocab] float32 of the requested rows of one segment."""
        cache = self.new_cache() if segment.cache is None else segment.cache
        cache.reserve(segment.positions, segment.retained)
        stored = self.config.num_kv_heads, self.config.head_dim
        slots = Cache(layers=[_Slots(cache, layer, stored, rows) for layer, rows in enumerate(self._rows)])
        if hooks is None:
            return self.call(segment, cache, slots, segment.states)
        with self.calls.visiting(hooks):
            return self.call(segment, cache, slots, segment.states)

    def call(
        self, segment: Segment, cache: KVCache, slots: Cache, states: torch.Tensor | None, *, masked: bool = True
    ) -> torch.Tensor:
        """`run` with these keys and values, where `cache` tells the positions.

        Args:
            masked: With our mask, not its own.
        """
        calls = self.calls
        given: dict[str, Any] = {
            "position_ids": calls.positions(segment.positions),
            "attention_mask": self._masks(segment, cache) if masked else None,
            str(self._argument): slots,
            "use_cache": True,
        }
        if states is not None:
            given["inputs_embeds"] = states.to(calls.device, calls.dtype)[None]
        else:
            given["input_ids"] = torch.as_tensor(segment.tokens, device=calls.device)[None]
        return calls.logits(given, segment.logit_rows)[0]

    def no_rows(self, slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [1, heads, slots, width] of zeros, for every layer."""
        calls = self.calls
        return [
            (
                torch.zeros(1, keys[0], slots, keys[1], dtype=calls.dtype, device=calls.device),
                torch.zeros(1, values[0], slots, values[1], dtype=calls.dtype, device=calls.device),
            )
            for keys, values in self._rows
        ]

    def _masks(self, segment: Segment, cache: KVCache) -> torch.Tensor | dict[str, torch.Tensor]:
        """What is added to attention weights, [1, 1, n, slots]; one for each kind of layer where there are two."""
        if cache.evicted:
            raise UnsupportedModel("a cache that lost some of its tokens cannot be used by a model of transformers")
        if cache.policy is not None:
            raise UnsupportedModel("attention inside of a model of transformers cannot ask a policy what to read")
        seen = dataclasses.replace(segment, cache=cache)
        slots = cache.length + segment.retained + len(segment)
        shape = len(segment), slots

        def mask(kind: str) -> torch.Tensor:
            visible = visibility(seen, 0, self.config.sliding_window if kind == "sliding_attention" else None)
            if kind == "chunked_attention":
                chunks = cache.positions[0, :slots] // self.chunk
                within = chunks == segment.positions[:, None] // self.chunk
                visible = within if visible is None else within & visible
            added = torch.zeros(shape, dtype=self.calls.dtype, device=self.calls.device)
            if visible is not None:
                hidden = torch.from_numpy(~np.asarray(visible)).to(self.calls.device)
                added.masked_fill_(hidden, torch.finfo(self.calls.dtype).min)
            return added[None, None]

        if len(self._kinds) > 1 or "chunked_attention" in self._kinds:
            return {kind: mask(kind) for kind in {*self._kinds, "full_attention"}}
        return mask(self._kinds[0])


class _Slots(DynamicLayer):
    """One layer of a `KVCache` as transformers sees it.

    Args:
        cache: The cache.
        layer: The layer's number.
        stored: Heads and width of the cache's rows.
        rows: Heads and width of the model's keys, and of its values.
    """

    is_sliding = False

    def __init__(
        self, cache: KVCache, layer: int, stored: tuple[int, int], rows: tuple[tuple[int, int], tuple[int, int]]
    ) -> None:
        super().__init__()
        self.cache, self.layer = cache, layer
        self.is_initialized = True
        self._stored, self._rows = stored, rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        if self._rows == (self._stored,) * 2:
            self.cache.write(self.layer, *given)
            keys, values = self.cache.view(self.layer)
            return keys[None], values[None]
        room = self._stored[1]
        flat = [torch.nn.functional.pad(each.flatten(1), (0, room - each[0].numel()))[:, None] for each in given]
        self.cache.write(self.layer, *flat)
        found = [
            stored[0, :, : heads * width].unflatten(1, (heads, width)).transpose(0, 1)[None]
            for stored, (heads, width) in zip(self.cache.view(self.layer), self._rows, strict=True)
        ]
        return found[0], found[1]

    def get_seq_length(self) -> int:
        return int(self.cache.lengths[self.layer]) + self.cache.retained

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0
