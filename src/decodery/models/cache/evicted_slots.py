"""Slots that some heads of a layer have lost and others still hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Losses:
    """By layer and key-value head, which slots of the content are lost.

    Empty until a head loses something.
    """

    def __init__(self, layers: int, kv_heads: int) -> None:
        self._shape = layers, kv_heads
        self.lost: np.ndarray | None = None  # [layers, kv_heads, slots] bool

    def __bool__(self) -> bool:
        return self.lost is not None

    def of(self, layer: int, length: int) -> np.ndarray | None:
        """[kv_heads, length] bool of a layer that holds so many slots, to be read only.

        None where nothing was lost.
        """
        if self.lost is None:
            return None
        if (room := self.lost.shape[2]) < length:
            self.lost = np.pad(self.lost, ((0, 0), (0, 0), (0, max(length, 2 * room) - room)))
        return self.lost[layer, :, :length]

    def lose(self, layer: int, length: int, slots: np.ndarray, heads: Sequence[int]) -> np.ndarray:
        """Let these heads lose these slots; returns the slots [m] that no head holds any more."""
        if self.lost is None:
            self.lost = np.zeros((*self._shape, length), dtype=bool)
        lost = self.of(layer, length)
        assert lost is not None
        lost[np.ix_(np.asarray(heads, dtype=np.int64), slots)] = True
        return np.flatnonzero(lost.all(axis=0))

    def gather(self, layer: int, slots: np.ndarray) -> None:
        """Let a layer's slots be these, in this order."""
        if (lost := self.of(layer, int(slots.max(initial=-1)) + 1)) is not None:
            lost[:, : len(slots)] = lost[:, slots]
            self.cut(layer, len(slots))

    def cut(self, layer: int, length: int) -> None:
        """What comes after the first slots of a layer will be held by every head."""
        if self.lost is not None:
            self.lost[layer, :, length:] = False

    def fork(self) -> Losses:
        clone = Losses(*self._shape)
        clone.lost = None if self.lost is None else self.lost.copy()
        return clone
