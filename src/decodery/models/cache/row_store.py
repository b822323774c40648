"""Where the rows of one text's keys and values lie, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from . import coded
from .evicted_slots import Losses
from .pages import PageTable

_MOST = torch.finfo(torch.float16).max


class RowStore:
    """Rows of keys and values in pages, as they are stored.

    Slots of a layer are counted over all its heads. A head that has lost some of them holds the others side by side, so
    that eviction in one head frees its pages.

    Attributes:
        pages: The pages.
        losses: Slots that some heads have lost.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, windowed: Sequence[int]
    ) -> None:
        """Take layers, kv_heads and head_dim as `shape`."""
        layers, kv_heads, head_dim = shape
        width = coded.row_bytes(head_dim, dtype) // dtype.itemsize
        self.pages = PageTable((layers, kv_heads, width), dtype, device, windowed)
        self.losses = Losses(layers, kv_heads)

    @property
    def coded(self) -> bool:
        """Whether rows are bytes, a row's scale after its numbers."""
        return coded.beside(self.pages.nothing.dtype) > 0

    def head_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """[layers, kv_heads] rows that each head holds of so many slots [layers]."""
        found = np.repeat(lengths[:, None], self.pages.nothing.shape[2], axis=1)
        for layer in range(len(found)):
            if (lost := self.losses.of(layer, int(lengths[layer]))) is not None:
                found[layer] -= lost.sum(axis=1)
        return found

    def ends(self, lengths: np.ndarray) -> np.ndarray:
        """The same, [layers, 1] where all heads hold as many."""
        return self.head_lengths(lengths) if self.losses else lengths[:, None]

    def put(self, layer: int, length: int, offset: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [kv_heads, n, head_dim] `offset` rows after the first `length` slots."""
        rows = self.elements(torch.stack((keys, values))).to(self.pages.nothing.dtype)[None]
        if (lost := self._lost(layer, length)) is None:
            self.pages.put(length + offset, rows, [layer])
            return
        for head, start in enumerate((length - lost.sum(axis=1)).tolist()):
            self.pages.put(start + offset, rows[:, :, head : head + 1], [layer], head)

    def read(self, layer: int, length: int, more: int) -> torch.Tensor:
        """Rows [2, kv_heads, length + more, row] of content and after it; zeros where a head lost its own."""
        if (lost := self._lost(layer, length)) is None:
            return self.pages.read(0, length + more, layer)
        nothing = self.pages.nothing
        found = nothing.new_zeros(2, nothing.shape[2], length + more, nothing.shape[4])
        for head in range(len(lost)):
            slots = torch.from_numpy(np.flatnonzero(~np.pad(lost[head], (0, more)))).to(nothing.device)
            found[:, head, slots] = self.pages.take(np.arange(len(slots)), [layer], head)[0, :, 0]
        return found

    def rows_of(self, layer: int, length: int, head: int, slots: np.ndarray) -> np.ndarray:
        """Where a head holds these slots."""
        if (lost := self._lost(layer, length)) is None:
            return slots
        before = np.concatenate((np.cumsum(lost[head]), np.zeros(1, dtype=np.int64)))
        before[-1] = lost[head].sum()
        moved: np.ndarray = slots - before[np.minimum(slots, length)]
        return moved.astype(slots.dtype)

    def gather(self, layers: Sequence[int], length: int, rows: np.ndarray, first: int) -> None:
        """Let the rows after `length` slots of layers that are alike be these of them, from the `first` on."""
        whole = [layer for layer in layers if self._lost(layer, length) is None]
        if whole:
            self.pages.move(length + rows[first:], length + first, whole)
        for layer in set(layers).difference(whole):
            for head, start in enumerate(self.head_lengths(np.full(layer + 1, length))[layer].tolist()):
                moved = self.pages.take(start + rows[first:], [layer], head)
                self.pages.put(start + first, moved, [layer], head)

    def drop(self, layer: int, lengths: np.ndarray, slots: np.ndarray, heads: Sequence[int] | None) -> np.ndarray:
        """Let these heads, or all, lose these slots; returns the slots that some head still holds.

        `losses` still counts all of them.
        """
        length = int(lengths[layer])
        every = range(self.pages.nothing.shape[2])
        lost = self._lost(layer, length)
        if heads is None and lost is None:
            left = np.setdiff1d(np.arange(length), slots)
            self._move(layer, lengths, None, left)
            return left
        before = np.zeros((len(every), length), dtype=bool) if lost is None else lost.copy()
        gone = self.losses.lose(layer, length, slots, every if heads is None else heads)
        after = self.losses.of(layer, length)
        assert after is not None
        for head in every:
            held, left = np.flatnonzero(~before[head]), np.flatnonzero(~after[head])
            if len(left) < len(held):
                self._move(layer, lengths, head, np.searchsorted(held, left))
        return np.setdiff1d(np.arange(length), gone)

    def pick(self, layer: int, lengths: np.ndarray, slots: np.ndarray) -> int:
        """Let each head hold these of its slots [kv_heads, m], ascending, where none has lost any.

        Returns:
            How many of the first slots stay where they are in all heads.
        """
        firsts = (slots == np.arange(slots.shape[1])).sum(axis=1).tolist()
        moved = [self.pages.take(slots[head, first:], [layer], head) for head, first in enumerate(firsts)]
        self.own(layer, lengths, min(firsts), slots.shape[1])
        for head, first in enumerate(firsts):
            self.pages.put(first, moved[head], [layer], head)
        return min(firsts)

    def own(self, layer: int, lengths: np.ndarray, start: int, stop: int, head: int | None = None) -> None:
        """Let rows [start, stop) of one layer, or one head of it, be this text's alone to write."""
        starts = self.head_lengths(lengths)
        stops = starts.copy()
        these = slice(None) if head is None else head
        starts[layer, these], stops[layer, these] = start, stop
        self.pages.own(starts, stops)

    def fork(self, lengths: np.ndarray) -> Self:
        """Rows of so many slots [layers], whose pages both share."""
        clone = object.__new__(type(self))
        clone.pages, clone.losses = self.pages.fork(self.ends(lengths)), self.losses.fork()
        return clone

    def elements(self, numbers: torch.Tensor) -> torch.Tensor:
        """Keys or values [..., head_dim] as they are to be stored."""
        if self.coded:
            return coded.encode(numbers, self.pages.nothing.dtype)
        # What float16 has no number for becomes the largest that it has.
        return numbers.clamp(-_MOST, _MOST) if self.pages.nothing.dtype == torch.float16 else numbers

    def numbers(self, elements: torch.Tensor) -> torch.Tensor:
        """What is stored as keys or values [..., head_dim]."""
        return coded.decode(elements) if self.coded else elements

    def _lost(self, layer: int, length: int) -> np.ndarray | None:
        """[kv_heads, length] bool where some head of the layer has lost some of its slots."""
        lost = self.losses.of(layer, length)
        return None if lost is None or not lost.any() else lost

    def _move(self, layer: int, lengths: np.ndarray, head: int | None, rows: np.ndarray) -> None:
        """Let the rows of one layer, or one head of it, be these of them, in ascending order."""
        first = int((rows == np.arange(len(rows))).sum())
        moved = self.pages.take(rows[first:], [layer], head)
        self.own(layer, lengths, first, len(rows), head)
        self.pages.put(first, moved, [layer], head)
