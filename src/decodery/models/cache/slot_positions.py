"""The positions that the slots of a cache hold, layer by layer."""

from __future__ import annotations

import numpy as np


class SlotPositions:
    """Positions of slots, kept once while the same slots of all layers hold the same ones.

    Attributes:
        held: What is kept: another array once there are more slots, or layers differ.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.held = np.zeros((1, 0), dtype=np.int32)

    @property
    def every(self) -> np.ndarray:
        """[layers, slots], to be read only."""
        return np.broadcast_to(self.held, (self._layers, self.held.shape[1]))

    def of(self, layer: int) -> np.ndarray:
        """[slots] of one layer, to be read only."""
        rows: np.ndarray = self.held[0 if len(self.held) == 1 else layer]
        return rows

    @property
    def table(self) -> tuple[np.ndarray, int]:
        """What is kept, and how many numbers further the next layer's begin: none where all layers share them."""
        return self.held, 0 if len(self.held) == 1 else self.held.strides[0] // self.held.itemsize

    def begin(self, positions: np.ndarray) -> None:
        """Hold these [n] int32 in all layers, and nothing else."""
        self.held = positions[None]

    def put(self, lengths: np.ndarray, retained: int, positions: np.ndarray, room: int) -> None:
        """Hold `positions` [n] after the content of layers of these lengths [layers], and what stays there.

        Args:
            room: Slots that may be written to before memory grows again.
        """
        starts, n = set(lengths.tolist()), len(positions)
        self.widen(max(starts) + retained + n, room)
        if len(starts) > 1:
            self.part()
        for start in starts:
            alike = slice(None) if len(starts) == 1 else lengths == start
            self.held[alike, start + retained : start + retained + n] = positions

    def widen(self, slots: int, room: int) -> None:
        """Have `slots` slots at least, and where there are fewer `room` of them."""
        held = self.held.shape[1]
        if slots > held:
            wider = np.zeros((len(self.held), max(slots, 2 * held, room)), dtype=np.int32)
            wider[:, :held] = self.held
            self.held = wider

    def gather(self, layers: list[int], start: int, rows: np.ndarray) -> None:
        """Let slots from `start` on hold what those of `rows` hold, counted from there.

        For layers that are alike.
        """
        every = slice(None) if len(self.held) == 1 else layers
        self.held[every, start : start + len(rows)] = self.held[every][:, start + rows]

    def set(self, layer: int, positions: np.ndarray) -> None:
        """Let the first slots of one layer hold these [n]."""
        self.part()
        self.held[layer, : len(positions)] = positions

    def part(self) -> None:
        """Let layers differ."""
        if len(self.held) < self._layers:
            self.held = self.held.repeat(self._layers, axis=0)

    def fork(self, length: int) -> SlotPositions:
        """A copy of the first `length` slots."""
        clone = SlotPositions(self._layers)
        clone.held = self.held[:, :length].copy()
        return clone
