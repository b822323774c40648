"""Layers that keep a state in place of keys and values: their recurrence over the rows of a tree, all at once.

STree: Speculative Tree Decoding for Hybrid State-Space Models (2025) does so for Mamba-2 (`mamba`); Gated DeltaNet's
states go on likewise (`gated_delta`).

What the cache keeps of a row is not a state but the few numbers a state is made from, in the slots where other layers
have keys and values. So a text is kept, cut, marked and forked as any other is, and the state after its content is
made of these numbers when the next pass needs it: no state is ever stored for a node of a tree. In float32 on a CPU
native kernels go through the rows (`native.scan`); elsewhere, and where gradients are gathered, PyTorch scans them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import pad, silu

from decodery.core.native.kernels import library
from decodery.core.native.structs import MixerStruct

from ..batch import Segment
from ..cache.cache import KVCache
from ..cache.kept_rows import KeptRows, behind
from ..config import ModelConfig
from ..native.scan import NativeScan
from .gated_delta import DeltaRule
from .mamba import MambaRule
from .selective import SelectiveRule
from .weights import Layer

CHUNK = 64
"""Rows that are scanned together."""


class StateRule(Protocol):
    """How a state goes on from row to row; rows are those of a `kept` width after the convolution.

    Attributes:
        nothing: The state before the first row, which is never written to.
    """

    nothing: torch.Tensor

    def scan(
        self, mixed: torch.Tensor, raw: torch.Tensor, seen: torch.Tensor, count: int, state: torch.Tensor
    ) -> torch.Tensor:
        """What the last `count` of T rows say: [count, inner].

        Args:
            mixed: [T, channels] after the convolution.
            raw: [T, steps] what steps are made of.
            seen: [T, T] bool, the rows that each sees, itself included.
            state: Before the first row.
        """
        ...

    def advance(self, mixed: torch.Tensor, raw: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state after rows that follow each other; see `scan`."""
        ...

    def gated(self, said: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """What rows say [n, inner] with their gates [n, inner], normed."""
        ...


def slots_of(config: ModelConfig, layer: int) -> list[int]:
    """The layers of a cache that hold what a recurrent layer keeps of its rows, its own where it is free."""
    assert config.states is not None
    spans = config.states.spans(config.num_kv_heads, config.head_dim)
    first = config.num_layers + (spans - 1) * sum(config.state_layers[:layer]) + sum(config.attending_layers[:layer])
    # Where a layer attends as well, its own slots hold keys and values.
    own = [] if config.attends_too(layer) else [layer]
    return [*own, *range(first, first + spans - len(own))]


class Recurrence:
    """The mixer of one recurrent layer, between its two projections."""

    def __init__(self, layer: Layer, index: int, config: ModelConfig) -> None:
        assert config.states is not None and layer.decay is not None and layer.conv is not None
        self._dtype = torch.promote_types(layer.decay.dtype, torch.float32)
        self._shape, self._index = config.states, index
        room = 2 * config.num_kv_heads * config.head_dim
        self._rows = KeptRows(slots_of(config, index), self._shape.width, room)
        self._conv = layer.conv.to(self._dtype)
        self._conv_bias = None if layer.conv_bias is None else layer.conv_bias.to(self._dtype)
        self._native: NativeScan | None = None
        kind = DeltaRule if config.delta is not None else MambaRule if config.mamba is not None else SelectiveRule
        rule = kind(layer, config, self._dtype)
        self._rule: StateRule = rule
        if self._dtype == torch.float32 and layer.decay.device.type == "cpu" and library() is not None:
            tensors = self._conv, self._conv_bias, *rule.tensors
            self._native = NativeScan(self._shape, tensors, config.norm_eps)

    @property
    def native(self) -> tuple[MixerStruct, Sequence[int]] | None:
        """See `native.mixers.Mixers`; None where PyTorch alone goes through the rows."""
        return None if self._native is None else (self._native.struct, self._rows.slots)

    def __call__(self, projected: torch.Tensor, segment: Segment, line: torch.Tensor | None) -> torch.Tensor:
        """Rows [n, inner + channels + steps] of one segment, as the first projection gives them -> [n, inner].

        line: [T] what `kept_rows.parents` says of the segment's tentative rows, None where they follow each other.
        """
        shape, cache = self._shape, segment.cache
        gate, held = projected.to(self._dtype).split((shape.inner, shape.width), dim=1)
        reach, native = 0, None if projected.requires_grad else self._native
        if cache is None:
            state = self._rule.nothing
        else:
            self._rows.write(cache, held)
            state, content = self._state(cache), int(cache.lengths[self._index])
            reach = min(content, shape.kernel - 1)
            held = self._read(cache, content - reach, content + cache.tentative)
        if native is not None:
            return native.said(held, reach, line, state, gate).to(projected.dtype)
        said = self._said(held, reach, len(segment), line, state)
        return self._rule.gated(said, gate).to(projected.dtype)

    def _said(
        self, held: torch.Tensor, reach: int, count: int, line: torch.Tensor | None, state: torch.Tensor
    ) -> torch.Tensor:
        """What the last `count` rows say, [count, inner]. held: `reach` rows of content, then all tentative ones."""
        if line is not None:
            mixed, raw = self._inputs(held, behind(line, reach), reach)
            return self._rule.scan(mixed, raw, _seen(line), count, state)
        mixed, raw = self._inputs(held, torch.arange(-1, len(held) - 1, device="cpu"), reach)
        found = []
        for first in range(0, count, CHUNK):
            some, own = mixed[first : first + CHUNK], raw[first : first + CHUNK]
            seen = torch.ones(len(some), len(some), dtype=torch.bool, device=held.device).tril()
            found.append(self._rule.scan(some, own, seen, len(some), state))
            if first + CHUNK < count:
                state = self._rule.advance(some, own, state)
        return torch.cat(found)

    def _inputs(self, held: torch.Tensor, parent: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels after the convolution, and what steps are made of, of the rows from `first` on.

        held: [m, channels + steps], what is kept of rows; parent: [m], the one before each, -1 for none.
        """
        shape = self._shape
        rows, raw = held.split((shape.channels, shape.steps), dim=1)
        # Where nothing comes before, and before that, stands a row of zeros.
        rows = pad(rows, (0, 0, 0, 1))
        parent = pad(parent.to(held.device), (0, 1), value=-1)
        place = torch.arange(first, len(held), device=held.device)
        found = torch.zeros(len(place), shape.channels, dtype=held.dtype, device=held.device)
        for back in range(shape.kernel):
            found = found + rows[place] * self._conv[:, -1 - back]
            place = parent[place]
        return silu(found if self._conv_bias is None else found + self._conv_bias), raw[first:]

    def _state(self, cache: KVCache) -> torch.Tensor:
        """The state after the content of a cache, from the last one that is known and what has come since."""
        content = int(cache.lengths[self._index])
        done, state = cache.states.last(self._index) or (0, self._rule.nothing)
        if done == content:
            return state
        while done < content:
            stop, reach = min(done + CHUNK, content), min(done, self._shape.kernel - 1)
            held = self._read(cache, done - reach, stop)
            if self._native is not None:
                done, state = stop, self._native.advance(held, reach, state)
                continue
            mixed, raw = self._inputs(held, torch.arange(-1, len(held) - 1, device="cpu"), reach)
            done, state = stop, self._rule.advance(mixed, raw, state)
        cache.states.add(self._index, content, state)
        return state

    def _read(self, cache: KVCache, start: int, stop: int) -> torch.Tensor:
        """What is kept of rows [start, stop) of content and tentative ones: [m, channels + steps]."""
        return self._rows.read(cache, start, stop).to(self._dtype)


def _seen(line: torch.Tensor) -> torch.Tensor:
    """[T, T] bool the rows that each of T tentative rows sees, by the row right before each."""
    seen = torch.eye(len(line), dtype=torch.bool, device=line.device)
    for row, parent in enumerate(line.tolist()):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen
