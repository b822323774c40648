"""Base class of the caches of a canvas, which choose the rows that a pass computes and those that it reuses."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError

from ..canvas import Canvas

__all__ = ["DiffusionCache", "Kept", "Plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The rows of one pass.

    Positions that are neither in `queries` nor in `keys` are left out of the pass.

    Attributes:
        queries: [q] positions whose rows are computed.
        keys: [k] other positions, whose keys and values are read as an earlier pass left them.
        active: [a] positions that may be written, None for all open positions of the region.
        fresh: Whether this pass computes everything that later passes read.
    """

    queries: np.ndarray
    keys: np.ndarray
    active: np.ndarray | None = None
    fresh: bool = False


NOTHING = np.zeros(0, dtype=np.int64)


@dataclass
class Kept:
    """The record of earlier passes that a cache plans from.

    Attributes:
        region: Region of the last pass.
        passed: Passes over that region so far.
        age: Passes since the last fresh one.
        final: Leading positions whose keys and values are final, None where rows attend to later positions.
        start: Number of the last fresh pass.
        read: [r] positions that the last fresh pass held.
    """

    region: tuple[int, int] | None = None
    passed: int = 0
    age: int = 0
    final: int | None = None
    start: int = 0
    read: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True)
class DiffusionCache(Contract):
    """A method that reuses keys and values of earlier passes.

    Fields are settings; the state of a canvas is in `Kept`.

    Attributes:
        steady: Whether the reused keys and values stay the same from the second pass of a region to its last.
        causal: Whether it works with models whose rows do not attend to later blocks.
        requires_predictable_order: Whether it needs a method with `predictable_order`.
    """

    @property
    def steady(self) -> bool:
        return False

    @property
    def causal(self) -> bool:
        return False

    @property
    def requires_predictable_order(self) -> bool:
        return False

    @abstractmethod
    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        """Choose the rows that the next pass over a region computes and reads.

        Args:
            canvas: The canvas.
            region: First and last position (exclusive).
            visible: Number of leading positions that its rows attend to.
            kept: The record of earlier passes.
        """


def require_refresh(name: str, value: int | None) -> None:
    """Raise SettingsError for a number of passes below 1."""
    if value is not None and value < 1:
        raise SettingsError(f"{name} is the number of passes between fresh ones: give at least 1, not {value}")
