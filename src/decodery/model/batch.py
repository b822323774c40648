"""What one pass of the model reads and returns: rows of several sequences, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..errors import SettingsError
from .cache import KVCache


@dataclass
class Segment:
    """One sequence's rows in one pass: a draft tree, a prefill chunk, a single token, a Jacobi window.

    positions: [n] position ids. tokens: [n] token ids, or embeddings: [n, hidden] in their place.
    mask: [n, stays + n] bool, which tentative rows each row sees (itself included): first those that stay, then its
    own pass's; None for causal order over all of them. A row's visible rows must stand in ascending position order, so
    that a row's result does not depend on what else is in the pass.
    cache: every row also sees all that the cache holds; the rows' own keys and values are written behind it as
    tentative ones, which `cache.keep(rows)` turns into content. None: rows see each other only.
    stays: how many tentative rows of earlier passes remain, from the first on; the new ones are written behind them.
    The others are overwritten, as all of them are by default.
    logit_rows: rows whose logits are wanted, None for all.
    """

    positions: np.ndarray
    tokens: np.ndarray | None = None
    embeddings: torch.Tensor | None = None
    mask: np.ndarray | None = None
    cache: KVCache | None = None
    logit_rows: Sequence[int] | None = None
    stays: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    def seen(self) -> np.ndarray:
        """`mask`, causal order written out: [n, stays + n] bool."""
        n, shape = len(self), (len(self), self.stays + len(self))
        if self.mask is None:
            return np.tri(n, self.stays + n, self.stays, dtype=bool)
        if self.mask.shape != shape:
            raise ValueError(
                f"a mask over {self.stays} rows that stay and {n} new ones is {shape}, not {self.mask.shape}"
            )
        return np.asarray(self.mask, dtype=bool)

    @classmethod
    def chunk(
        cls, tokens: Sequence[int] | np.ndarray, cache: KVCache, logit_rows: Sequence[int] | None = None
    ) -> Segment:
        """Consecutive tokens right after what `cache` has seen."""
        ids = np.asarray(tokens, dtype=np.int64)
        positions = np.arange(cache.next_position, cache.next_position + len(ids))
        return cls(positions=positions, tokens=ids, cache=cache, logit_rows=logit_rows)


@dataclass
class Batch:
    """Segments flattened to `rows` rows: linear layers see all rows at once, attention works per segment."""

    segments: list[Segment]

    @cached_property
    def offsets(self) -> list[int]:
        """First row of every segment, then the total: [len(segments) + 1]."""
        total, result = 0, [0]
        for segment in self.segments:
            total += len(segment)
            result.append(total)
        return result

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    @cached_property
    def positions(self) -> np.ndarray:
        """[N] position ids of all rows."""
        if len(self.segments) == 1:
            return self.segments[0].positions
        return np.concatenate([segment.positions for segment in self.segments])

    @cached_property
    def logit_rows(self) -> tuple[np.ndarray, list[int]]:
        """Flat indices of the rows whose logits are wanted [M], and where each segment's begin among them."""
        parts, bounds = [], [0]
        for segment, offset in zip(self.segments, self.offsets, strict=False):
            rows = np.arange(len(segment)) if segment.logit_rows is None else np.asarray(segment.logit_rows)
            parts.append(rows.astype(np.int64) + offset)
            bounds.append(bounds[-1] + len(rows))
        return np.concatenate(parts), bounds


def tapped_layers(taps: Sequence[int], layers: int, run: Sequence[int] | None = None) -> dict[int, int]:
    """After how many layers each tap of a model of so many `layers` is taken; negative ones count from the end.

    0 is the embeddings, -1 after the last layer. run: the layers that are run, None for all. Raises SettingsError for
    a tap that the pass does not come by.
    """
    found = {tap: tap if tap >= 0 else layers + 1 + tap for tap in taps}
    for tap, after in found.items():
        if not 0 <= after <= layers:
            raise SettingsError(
                f"there is no state after layer {tap} of {layers}: taps are 0 (the embeddings) to {layers}, "
                f"or -1 (after the last layer) to {-layers - 1}"
            )
        if run is not None and after > 0 and after - 1 not in run:
            raise SettingsError(f"there is no state after layer {tap} in a pass that leaves that layer out")
    return found


@dataclass
class Scores:
    """What a pass returns. logits: [M, vocab] float32, the requested rows of all segments in order.

    hidden: {tap: [N, hidden]}, the residual stream after that many layers (0: the embeddings, -1: after the last), by
    the taps as they were asked for.
    """

    logits: torch.Tensor
    bounds: list[int]
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)

    def of(self, segment: int) -> torch.Tensor:
        """Logits [m, vocab] of one segment's requested rows."""
        return self.logits[self.bounds[segment] : self.bounds[segment + 1]]

    def hidden_of(self, segment: int, layer: int) -> torch.Tensor:
        """Hidden states [n, hidden] of one segment's rows at the tap `layer`."""
        return self.hidden[layer][self.offsets[segment] : self.offsets[segment + 1]]
