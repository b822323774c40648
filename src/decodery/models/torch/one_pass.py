"""What all layers of one pass share: the rows of every text, their caches, masks and angles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from decodery.core.errors import UnsupportedModel
from decodery.core.native.structs import MixerStruct

from ..batch import Batch, Segment
from ..cache.kept_rows import parents
from ..config import ModelConfig, Rope
from .attention import attend, attend_by_policy, visibility
from .paged_rows import PagedRows, serves, windows_of
from .short_conv import ShortConvolution

if TYPE_CHECKING:
    from .layers import TorchLayers


class Mixer(Protocol):
    """What a layer has in place of attention, between its two projections."""

    def __call__(self, projected: torch.Tensor, segment: Segment, line: torch.Tensor | None) -> torch.Tensor:
        """What is found for the rows of a segment, see `Pass.line` for the order they follow each other in."""
        ...

    @property
    def native(self) -> tuple[MixerStruct, Sequence[int]] | None:
        """See `native.mixers.Mixers`; None where PyTorch alone goes through the rows."""
        ...


class Pass:
    """What all layers of one pass share: rotation angles, attention masks and the caches.

    Attributes:
        inputs: [N, layers, layer_inputs] what layers read of the tokens, of no rows where they read nothing.
    """

    def __init__(self, model: TorchLayers, batch: Batch) -> None:
        self.model = model
        self.batch, self.positions = batch, batch.positions
        self.spans: list[tuple[Segment, int, int]] = [
            (segment, first, first + len(segment))
            for segment, first in zip(batch.segments, batch.offsets, strict=False)
        ]
        self._angles: dict[tuple[Rope, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._masks: dict[tuple[int, bool, int], torch.Tensor | None] = {}
        self._lines: dict[int, torch.Tensor | None] = {}
        self._reused: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._together = [n for n, each in enumerate(batch.segments) if model.pages_together and self._pages(each)]
        self._paged: PagedRows | None = None
        if self._together:
            self._windows = windows_of(model.config)
            segments = [batch.segments[number] for number in self._together]
            self._paged = PagedRows.of(segments, model.config, self._windows, model.dtype)
        self.inputs = torch.empty(0, dtype=model.dtype, device=model.device)

    def angles(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rope, dim = self.model.config.layer_rope(layer), self.model.config.head_shape(layer)[1]
        if (rope, dim) not in self._angles:
            cos, sin = self.model.angles(rope, self.positions, dim)
            self._angles[rope, dim] = cos[:, None].to(self.model.dtype), sin[:, None].to(self.model.dtype)
        return self._angles[rope, dim]

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write the rows' keys and values [N, kv_heads, head_dim] and attend.

        [N, heads, head_dim] -> [N, hidden].
        """
        config = self.model.config
        if config.tempers(layer):
            queries = queries * self._tempered
        paged, rest = self._paged, range(len(self.spans))
        if paged is None:
            parts = [self._alone(number, layer, queries, keys, values) for number in rest]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        for number in self._together:
            cache = self.spans[number][0].cache
            assert cache is not None
            cache.written[layer] = cache.tentative
        kind, sinks = self._windows.index(config.window(layer)), self.model.weights.layers[layer].sinks
        settings = config.attention_scale, config.attention_cap, sinks
        if len(self._together) == len(self.spans):
            with paged.pool.still():
                return paged.attend(layer, kind, queries, keys, values, *settings)
        context = queries.new_empty(len(queries), queries[0].numel())
        with paged.pool.still():
            index = self._index
            context[index] = paged.attend(layer, kind, queries[index], keys[index], values[index], *settings)
        for number in sorted({*rest} - {*self._together}):
            context[self.spans[number][1] : self.spans[number][2]] = self._alone(number, layer, queries, keys, values)
        return context

    def _pages(self, segment: Segment) -> bool:
        """Whether attention of a segment is computed with that of others."""
        config = self.model.config
        return not (apart(config) or torch.is_grad_enabled()) and serves(segment, config)

    @cached_property
    def _index(self) -> torch.Tensor:
        """The rows of the segments that are taken together."""
        rows = [np.arange(*self.spans[number][1:]) for number in self._together]
        return to_device(np.concatenate(rows), self.model.device)

    def _alone(
        self, number: int, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """`attend` of one segment by itself."""
        (segment, first, last), config = self.spans[number], self.model.config
        seen_keys, seen_values = self._seen(number, layer, keys[first:last], values[first:last])
        own = queries[first:last]
        if segment.cache is not None and (segment.cache.policy is not None or segment.steered):
            own = own * config.attention_scale
            if config.head_shapes or config.reused_layers:
                raise UnsupportedModel("rows of a model whose layers share keys cannot be steered: leave that out")
            if config.sinks:
                raise UnsupportedModel("rows of a model whose heads have sinks cannot be steered: leave that out")
            window, cap = config.window(layer), config.attention_cap
            return attend_by_policy(own, seen_keys, seen_values, segment, layer, window, cap)
        sinks = self.model.weights.layers[layer].sinks
        mask = self.mask(number, layer)
        return attend(own, seen_keys, seen_values, mask, config.attention_scale, config.attention_cap, sinks)

    def _seen(
        self, number: int, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, L, head_dim] of a segment in a layer, its own rows [n, kv_heads, head_dim] last.

        A layer without keys of its own has none among its rows, and reads those of an earlier one.
        """
        segment, config = self.spans[number][0], self.model.config
        source = config.kv_layer(layer)
        if source != layer:
            return self._reused[number, source]
        if segment.cache is None:
            found = keys.transpose(0, 1), values.transpose(0, 1)
        else:
            segment.cache.write(layer, widened(keys, config), widened(values, config))
            of_keys, of_values = (each.to(keys.dtype) for each in segment.cache.view(layer))
            found = narrowed(of_keys, config, layer), narrowed(of_values, config, layer)
        if config.reused_layers:
            self._reused[number, layer] = found
        return found

    @cached_property
    def _tempered(self) -> torch.Tensor:
        """[N, 1, 1] what queries are multiplied by where they grow."""
        own = self.model.config.temperature
        assert own is not None
        found = to_device(own.at(self.positions), self.model.device)
        return found[:, None, None].to(self.model.dtype)

    def mix(self, mixer: Mixer, projected: torch.Tensor) -> torch.Tensor:
        """What a recurrent layer finds, row by row of every segment."""
        parts = [
            mixer(projected[first:last], segment, self.line(number))
            for number, (segment, first, last) in enumerate(self.spans)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def line(self, number: int) -> torch.Tensor | None:
        """The tentative row right before each of a segment, None where they follow each other."""
        if number not in self._lines:
            segment = self.spans[number][0]
            follow = segment.mask is None and not segment.retained
            self._lines[number] = None if follow else parents(to_device(segment.seen(), self.model.device))
        return self._lines[number]

    def convolve(self, convolution: ShortConvolution, normed: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of every segment after a layer's convolution."""
        parts = [convolution(projected[first:last], normed[first:last], segment) for segment, first, last in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mask(self, number: int, layer: int) -> torch.Tensor | None:
        segment = self.spans[number][0]
        window = self.model.config.window(layer)
        # Layers differ only in their window, unless eviction left them with different slots.
        evicted = segment.cache is not None and segment.cache.evicted
        key = (number, window is not None, layer if evicted else -1)
        if key not in self._masks:
            seen = visibility(segment, self.model.config.kv_layer(layer), window)
            self._masks[key] = None if seen is None else to_device(seen, self.model.device)
        return self._masks[key]


def apart(config: ModelConfig) -> bool:
    """Whether a model's attention is computed text by text, whatever the texts are."""
    return bool(config.keeps_order or config.head_shapes or config.reused_layers)


def widened(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Keys or values [n, kv_heads, head_dim] of a layer as a cache for all layers holds them."""
    if not config.head_shapes:
        return rows
    flat, shape = rows.flatten(1), (config.num_kv_heads, config.head_dim)
    return pad(flat, (0, shape[0] * shape[1] - flat.shape[1])).unflatten(1, shape)


def narrowed(held: torch.Tensor, config: ModelConfig, layer: int) -> torch.Tensor:
    """Keys or values [kv_heads, L, head_dim] of a layer, as `widened` put them into a cache."""
    kv_heads, dim = config.head_shape(layer)
    if dim == config.head_dim:
        return held[:kv_heads]
    return held.transpose(0, 1).flatten(1)[:, : kv_heads * dim].unflatten(1, (kv_heads, dim)).transpose(0, 1)


def open_caches(batch: Batch, config: ModelConfig, layers: Sequence[int] | None) -> None:
    """Make room in every cache; set which rows see each other in a model that is not causal."""
    for number, segment in enumerate(batch.segments):
        if not config.causal and segment.mask is None:
            batch.segments[number] = segment = dataclasses.replace(segment, mask=_sight(segment, config.block_length))
        if segment.cache is not None:
            segment.cache.reserve(segment.positions, segment.retained, layers)
        elif segment.retained:
            raise ValueError("rows can stay only in a cache, and this segment has none")


def _sight(segment: Segment, block_length: int | None) -> np.ndarray:
    """Which tentative rows each row sees in a model that is not causal: all, or those of no later block."""
    if block_length is None:
        return np.ones((len(segment), segment.retained + len(segment)), dtype=bool)
    places = segment.positions
    if segment.cache is not None and segment.retained:
        start = int(segment.cache.lengths[0])
        places = np.concatenate((segment.cache.positions[0, start : start + segment.retained], places))
    seen: np.ndarray = places[None, :] // block_length <= segment.positions[:, None] // block_length
    return seen


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of an array, on the device; what is a tensor there stays where it is."""
    # A blocking copy would wait until the device has done all that was asked of it so far.
    given = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return given.to(device, non_blocking=True)
