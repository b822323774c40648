"""The same bounds at every step."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget, DraftLengthPolicy
from decodery.step.sequence import Sequence


@register("fixed", paper="Fast Inference from Transformers via Speculative Decoding (2023)", lossless=True)
@dataclass(frozen=True)
class Fixed(DraftLengthPolicy):
    """Lets every step draft up to the same number of tokens, to the same depth.

    Attributes:
        nodes: Drafted tokens per step; 0 is plain decoding.
        depth: How far from the root; None is as far as they reach.
    """

    nodes: int = 4
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 0 or (self.depth is not None and self.depth < 1):
            raise SettingsError("fixed needs nodes >= 0 and depth >= 1")

    def largest(self) -> int:
        return self.nodes

    def bound(self, seq: Sequence, limit: Budget, batch: Ordered[Sequence]) -> Budget:
        depth = limit.depth if self.depth is None else min(self.depth, limit.depth)
        return replace(limit, nodes=min(self.nodes, limit.nodes), depth=depth)
