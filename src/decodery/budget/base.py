"""How much a step may draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds for one step's draft: `nodes` drafted tokens, none further than `depth` from the root."""

    nodes: int
    depth: int
