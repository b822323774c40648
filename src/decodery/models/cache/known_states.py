"""Recurrent states that are known of a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

_MOST = 4


class SpareMemory(Protocol):
    """Memory that a model keeps for states to come, of all of its texts."""

    @property
    def bytes(self) -> int:
        """Of what no state takes now."""
        ...


@dataclass
class States:
    """By layer: after how much content a state stands, and the state; the latest few alone.

    A state is a tensor or a snapshot. They follow from what a cache holds, and are made anew where they are missing:
    forgetting them costs time alone.

    Attributes:
        known: By layer, the earliest first.
        tentative: A layer's state after all tentative rows, and how much content there is if all of them are kept.
        memory: Where the memory of states goes once nothing holds them, None where nothing keeps it.
        size: Bytes of the states of all layers after some content, 0 where that is not known.
    """

    known: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)
    tentative: tuple[int, int, Any] | None = None
    memory: SpareMemory | None = None
    size: int = 0

    @property
    def held(self) -> dict[int, int]:
        """Bytes of each state by its id, which forks share."""
        every = [state for each in self.known.values() for _, state in each]
        if self.tentative is not None:
            every.append(self.tentative[2])
        return {id(state): state.nbytes for state in every}

    @property
    def bytes(self) -> int:
        return sum(self.held.values())

    @property
    def due(self) -> int:
        """Bytes, at most, that later states take beside these: the newest is made while all others are there."""
        return max((_MOST + 1) * self.size - self.bytes, 0) if self.size else 0

    def last(self, layer: int) -> tuple[int, torch.Tensor] | None:
        """The state after the most content."""
        found = self.known.get(layer)
        return found[-1] if found else None

    def add(self, layer: int, length: int, state: torch.Tensor) -> None:
        """Remember the state after so much content."""
        self.known[layer] = [*self.known.get(layer, [])[1 - _MOST :], (length, state)]

    def keep(self, lengths: np.ndarray) -> None:
        """Tentative rows have become content, from the first on.

        Args:
            lengths: [layers], how much content there is now.
        """
        if self.tentative is not None:
            layer, length, state = self.tentative
            if lengths[layer] == length:
                self.add(layer, length, state)

    def doubt(self, layer: int, length: int) -> None:
        """Content from `length` on is no longer what it was."""
        if layer in self.known:
            self.known[layer] = [each for each in self.known[layer] if each[0] <= length]

    def fork(self) -> States:
        """States are never written to, so that a fork shares them."""
        return States(dict(self.known), memory=self.memory, size=self.size)
