"""What a cache of a canvas is: it says which rows a pass computes, and which it reads as an earlier pass left them."""

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
    """One pass.

    Positions in neither are not there for this pass.

    Attributes:
        queries: [q] positions whose rows are computed.
        keys: [k] others that are read as they were left.
        active: [a] positions that may be written, None for all that are open in the region.
        fresh: Whether everything that later passes read comes from this one.
    """

    queries: np.ndarray
    keys: np.ndarray
    active: np.ndarray | None = None
    fresh: bool = False


NOTHING = np.zeros(0, dtype=np.int64)


@dataclass
class Kept:
    """What a cache knows of the passes before.

    Attributes:
        region: That of the last pass.
        passed: How many passes it has had.
        age: Passes since the last fresh one.
        final: How many positions from the first on will never be computed otherwise, None where rows see what comes
            later.
        start: The number of the last fresh pass.
        read: [r] positions there in it.
    """

    region: tuple[int, int] | None = None
    passed: int = 0
    age: int = 0
    final: int | None = None
    start: int = 0
    read: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True)
class DiffusionCache(Contract):
    """A way of reusing keys and values.

    Fields are settings; what is remembered is in `Kept`.

    Attributes:
        steady: Whether what is read stays the same from the second pass of a region to its last.
        causal: Whether it goes with models whose rows see nothing of later blocks.
    """

    @property
    def steady(self) -> bool:
        return False

    @property
    def causal(self) -> bool:
        return False

    @property
    def foretold(self) -> bool:
        return False

    @abstractmethod
    def plan(self, canvas: Canvas, region: tuple[int, int], visible: int, kept: Kept) -> Plan:
        """What the next pass over a region computes and reads.

        Args:
            canvas: The canvas.
            region: First and last position (exclusive).
            visible: How many positions its rows see.
            kept: What is known of the passes before.
        """


def require_refresh(name: str, value: int | None) -> None:
    """Raise SettingsError for a number of passes that is none."""
    if value is not None and value < 1:
        raise SettingsError(f"{name} counts passes from one to the next fresh one: give at least 1, not {value}")
