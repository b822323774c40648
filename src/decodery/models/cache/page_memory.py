"""The memory of some blocks, whose oldest part goes back to the system where layers with a window no longer read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..mapped_memory import discard

SLOTS = 16
"""Slots of a block: the most that a fork copies, and the least it takes, when it writes."""


class PageMemory:
    """The memory of some blocks, and how many `bytes` of it are there.

    Args:
        data: [layers, 2 (keys, values), kv_heads, slots, head_dim]; a replacement copies all slots. The last block is
            shorter where the slots are no multiple of `SLOTS`. For every block [blocks] holders: how many texts hold
            it.
        writer: The name of the one that may fill it up.
        frozen: How many of its first slots others may have been given.
        needed: How many texts may still read it in the layers `windowed`.
        gone: Whether what it holds of these was given back. Its addresses stay, and read as zeros until they are
            written to.
    """

    def __init__(self, data: torch.Tensor, windowed: Sequence[int] = ()) -> None:
        blocks = -(-data.shape[3] // SLOTS)
        self.data = data
        self.bytes = data.nbytes
        self.holders = np.zeros(blocks, dtype=np.int32)
        self.writer = np.zeros(blocks, dtype=np.int64)
        self.frozen = np.zeros(blocks, dtype=np.int32)
        self.windowed = windowed
        self.needed = np.zeros(blocks, dtype=np.int32)
        self.gone = np.zeros(blocks, dtype=np.bool_)
        _, both, kv_heads, _, head_dim = data.shape
        self._windowed_bytes = len(windowed) * both * kv_heads * SLOTS * head_dim * data.itemsize

    def need(self, first: int, last: int) -> None:
        """One more text may read blocks [first, last) in layers with a window, or write to them."""
        if self.windowed:
            self.needed[first:last] += 1
            self.bytes += int(self.gone[first:last].sum()) * self._windowed_bytes
            self.gone[first:last] = False

    def release_passed(self, first: int, last: int) -> None:
        """One text less may read these; what no text may read but one holds is given back."""
        if not self.windowed or first >= last:
            return
        self.needed[first:last] -= 1
        free = (self.needed[first:last] == 0) & (self.holders[first:last] > 0) & ~self.gone[first:last]
        if not free.any():
            return
        self.gone[first:last] |= free
        self.bytes -= int(free.sum()) * self._windowed_bytes
        # A page that two blocks share is only given back with both, so neighbours go once more.
        edges = np.flatnonzero(np.diff(self.gone, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2).tolist():
            if begin < last and end > first:
                self._discard(begin * SLOTS, min(end * SLOTS, self.data.shape[3]))

    def _discard(self, begin: int, end: int) -> None:
        """Give back these slots of all layers with a window."""
        layers, kinds, heads, slot, _ = self.data.stride()
        start, size = self.data.data_ptr(), self.data.itemsize
        for layer in self.windowed:
            for kind in range(self.data.shape[1]):
                for head in range(self.data.shape[2]):
                    place = layer * layers + kind * kinds + head * heads
                    discard(start + (place + begin * slot) * size, start + (place + end * slot) * size)
