"""A cache whose content is given, and whose new rows keep their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..model.cache import KVCache


class TracedCache(KVCache):
    """What stands before the rows of one pass: past [layers, 2, kv_heads, n, head_dim], its first slot at `first`.

    Rows are held aside and joined to it where they are attended to, so that gradients reach them, and the past where it
    is learned. It is read by one pass and never kept. Slots at negative positions belong to no token, as a prefix does.
    """

    def __init__(self, past: torch.Tensor, first: int = 0) -> None:
        layers, _, kv_heads, n, head_dim = past.shape
        super().__init__(layers, kv_heads, head_dim, dtype=past.dtype, device=past.device)
        self.past = past
        self.rows: dict[int, torch.Tensor] = {}
        self.lengths += n
        self._places = np.arange(first, first + n, dtype=np.int32)[None]
        self.next_position = first + n
        self.prefix = max(0, -first)

    def reserve(self, positions: np.ndarray, stays: int = 0, layers: Sequence[int] | None = None) -> None:
        self._places = np.concatenate((self._places[:, : self.length], positions[None].astype(np.int32)), axis=1)
        self.scratch = len(positions)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows[layer] = torch.stack((keys, values)).transpose(1, 2)

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows[layer]
        keys, values = torch.cat((self.past[layer].to(rows.dtype), rows), dim=2)
        return keys, values
