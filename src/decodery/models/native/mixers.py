"""Layers that mix rows in place of attention, within native passes: where their rows and states lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodery.core.native.kernels import Rule, address
from decodery.core.native.structs import MixerStruct, SegmentStruct

from ..cache.kept_rows import parents
from .state_memory import StateMemory

if TYPE_CHECKING:
    from ..batch import Segment


_LAG = 4
"""Rows of content by which states may lag behind.

Going through so many rows once more takes less time than writing states to memory after each of them. Not of Mamba-1,
whose scan computes more per number.
"""


class Mixers:
    """Those of a model.

    Args:
        layers: By layer, what kernels read of its mixer, and the layers of a cache that hold what it keeps of rows.
            States of all layers lie in one tensor: they are made and forgotten together.
    """

    def __init__(self, layers: Mapping[int, tuple[MixerStruct, Sequence[int]]]) -> None:
        self._layers, self._slots, size = layers, [], 0
        for struct, slots in layers.values():
            held = np.asarray(slots, dtype=np.int32)
            self._slots.append(held)
            struct.slots, struct.slot_count, struct.state_at = address(held, np.int32, len(slots)), len(slots), size
            if struct.rule != Rule.GATED_CONV:
                size += struct.heads * struct.head_dim * struct.state
        self._lag = 1 if any(struct.rule == Rule.MAMBA1 for struct, _ in layers.values()) else _LAG
        self._first = min(layers)
        self._nothing = torch.zeros(size, dtype=torch.float32, device="cpu")
        self._memory = StateMemory(size)

    def address(self, layer: int) -> int | None:
        """Where the kernels find the mixer of a layer, None where it attends."""
        return ctypes.addressof(self._layers[layer][0]) if layer in self._layers else None

    def describe(self, segment: Segment, struct: SegmentStruct) -> MixedSegment:
        """Write what the rows of a segment begin from; the result must live as long as the pass."""
        cache, size = segment.cache, len(self._nothing)
        n, wanted = len(segment), segment.logit_rows
        lone = n == 1 and not segment.retained
        line = None if lone or (segment.mask is None and not segment.retained) else _line(segment)
        struct.parents = None if line is None else address(line, np.int32, segment.retained + n)
        content, known, before, after, through = 0, 0, self._nothing, None, False
        if cache is not None:
            content = known = int(cache.lengths[self._first])
            if size:
                known, before = cache.states.last(self._first) or (0, before)
            lag = content - known
            if size and line is None and lag + n >= self._lag:
                # What is no draft becomes content: part of a prompt, and most lone rows. Those that do not would have
                # the pass go through what comes before them each time.
                through = lag < self._lag if n == 1 else wanted is not None and len(wanted) < n
            if through or (lag > 0 and (line is not None or lag >= self._lag)):
                cache.states.memory, after = self._memory, self._memory.take()
        struct.known, struct.keeps, struct.through = known, int(cache is not None), int(through)
        struct.states = address(before, torch.float32, size)
        struct.after = None if after is None else address(after, torch.float32, size)
        return MixedSegment(self._first, segment, content + n * through, before, after, line)


class MixedSegment:
    """The states of a segment's text before a pass, and those that the pass leaves."""

    def __init__(
        self,
        layer: int,
        segment: Segment,
        length: int,
        before: torch.Tensor,
        after: torch.Tensor | None,
        line: np.ndarray | None,
    ) -> None:
        self._layer, self._segment, self._length, self._after = layer, segment, length, after
        self._alive = before, line

    def settle(self) -> None:
        """Remember the states, once the pass is done."""
        if self._after is None:
            return
        cache = self._segment.cache
        assert cache is not None
        if self._length > cache.lengths[self._layer]:
            cache.states.tentative = self._layer, self._length, self._after
        else:
            cache.states.add(self._layer, self._length, self._after)


def _line(segment: Segment) -> np.ndarray:
    """[T] int32 the tentative row right before each, -1 for none."""
    found: np.ndarray = parents(torch.from_numpy(segment.seen())).numpy().astype(np.int32)
    return found
