"""Memory of recurrent states, which passes write anew every few rows."""

from __future__ import annotations

import mmap
from weakref import finalize

import numpy as np
import torch

from decodery.core.mapped_memory import anonymous

_SPARE = 2


class StateMemory:
    """Tensors of the states of all layers, whose memory is used again once nothing holds them.

    New memory is cleared by the system as it is first touched, by small pages in more time than a pass of one row
    takes.

    Args:
        size: Numbers of a tensor.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: list[mmap.mmap] = []

    @property
    def bytes(self) -> int:
        """Of what nothing holds and is kept for later states."""
        return sum(map(len, self._spare))

    def take(self) -> torch.Tensor:
        """[size] float32, with any content."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = anonymous(4 * self._size)
        held = np.frombuffer(memory, dtype=np.float32, count=self._size)
        # A tensor, and all that shares its memory, holds this array.
        finalize(held, self._put_back, memory).atexit = False
        return torch.from_numpy(held)

    def _put_back(self, memory: mmap.mmap) -> None:
        if len(self._spare) < _SPARE:
            self._spare.append(memory)
