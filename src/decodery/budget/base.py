"""How much a step may draft, and what it would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds for one step's draft: `nodes` drafted tokens, none further than `depth` from the root.

    sequences: how many share the pass. pass_seconds: gives the times of passes over 0, 1, 2, ... rows on this machine,
    [rows] float64, where they are known; asking the first time may take seconds.
    """

    nodes: int
    depth: int
    sequences: int = 1
    pass_seconds: Callable[[], np.ndarray] | None = None
