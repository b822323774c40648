"""The positions that the slots of a cache hold, layer by layer."""

from __future__ import annotations

import numpy as np


class SlotPositions:
    """Positions of slots, kept once while the same slots of all layers hold the same ones."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._rows = np.zeros((1, 0), dtype=np.int32)

    @property
    def every(self) -> np.ndarray:
        """[layers, slots], to be read only."""
        return np.broadcast_to(self._rows, (self._layers, self._rows.shape[1]))

    def of(self, layer: int) -> np.ndarray:
        """[slots] of one layer, to be read only."""
        rows: np.ndarray = self._rows[0 if len(self._rows) == 1 else layer]
        return rows

    @property
    def held(self) -> np.ndarray:
        """What is kept: another array once there are more slots, or layers differ."""
        return self._rows

    @property
    def table(self) -> tuple[np.ndarray, int]:
        """What is kept, and how many numbers further the next layer's begin: none where all layers share them."""
        return self._rows, 0 if len(self._rows) == 1 else self._rows.strides[0] // self._rows.itemsize

    def begin(self, positions: np.ndarray) -> None:
        """Hold these [n] int32 in all layers, and nothing else."""
        self._rows = positions[None]

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
            self._rows[alike, start + retained : start + retained + n] = positions

    def widen(self, slots: int, room: int) -> None:
        """Have `slots` slots at least, and where there are fewer `room` of them."""
        held = self._rows.shape[1]
        if slots > held:
            wider = np.zeros((len(self._rows), max(slots, 2 * held, room)), dtype=np.int32)
            wider[:, :held] = self._rows
            self._rows = wider

    def gather(self, layers: list[int], start: int, rows: np.ndarray) -> None:
        """Let slots from `start` on hold what those of `rows` hold, counted from there.

        For layers that are alike.
        """
        every = slice(None) if len(self._rows) == 1 else layers
        self._rows[every, start : start + len(rows)] = self._rows[every][:, start + rows]

    def set(self, layer: int, positions: np.ndarray) -> None:
        """Let the first slots of one layer hold these [n]."""
        self.part()
        self._rows[layer, : len(positions)] = positions

    def part(self) -> None:
        """Let layers differ."""
        if len(self._rows) < self._layers:
            self._rows = self._rows.repeat(self._layers, axis=0)

    def fork(self, length: int) -> SlotPositions:
        """A copy of the first `length` slots."""
        clone = SlotPositions(self._layers)
        clone._rows = self._rows[:, :length].copy()
        return clone
