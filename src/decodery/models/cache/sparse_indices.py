"""The slots each row of each key-value head reads in one layer, as lists for those who gather them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from ..batch import Segment
from ..torch.attention import visible
from .attention_policy import Attention, reads, settle


@dataclass(eq=False)
class SparseIndices:
    """What one segment reads in one layer.

    Attributes:
        read: [kv_heads, n, slots] bool.
        slots: The ones that are read, row after row of head after head, int32.
        starts: [kv_heads * n + 1] int32, where each row's begin.
        weights: [heads / kv_heads, len(slots)] and mass [n, heads], written by whoever attends, where the policy wants
            them.
    """

    attention: Attention
    read: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    weights: torch.Tensor | None
    mass: torch.Tensor

    @classmethod
    def of(cls, segment: Segment, layer: int, queries: torch.Tensor, window: int | None) -> SparseIndices:
        """To be asked when the rows' keys and values are written.

        Args:
            queries: [n, heads, head_dim], scaled.
        """
        cache = segment.cache
        assert cache is not None
        # Policies compute in the precision of the queries, whatever the cache holds.
        keys, values = (each.to(queries.dtype) for each in cache.view(layer))
        attention = Attention(
            layer, segment, queries, keys, values, visible(segment, layer, window), segment.bias(layer)
        )
        read = reads(cache.policy, attention, len(keys))
        counts = read.reshape(-1, read.shape[-1]).sum(axis=1)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        slots = np.concatenate([np.flatnonzero(head) % read.shape[-1] for head in read]).astype(np.int32)
        n, heads = queries.shape[:2]
        wanted = attention.bias is not None
        wanted |= cache.policy is not None and (cache.policy.observes or cache.policy.merges)
        weights = torch.empty(heads // len(keys), len(slots), dtype=torch.float32, device="cpu") if wanted else None
        return cls(attention, read, slots, starts, weights, torch.empty(n, heads, dtype=torch.float32, device="cpu"))

    @cached_property
    def rows_read(self) -> np.ndarray:
        """Where each head holds its `slots`."""
        cache, layer = self.attention.segment.cache, self.attention.layer
        assert cache is not None
        if not cache.losses:
            return self.slots
        length, bounds = int(cache.lengths[layer]), self.starts[:: self.rows]
        heads = (
            cache.store.rows_of(layer, length, head, self.slots[begin:end])
            for head, (begin, end) in enumerate(pairwise(bounds.tolist()))
        )
        return np.concatenate([np.zeros(0, dtype=np.int32), *heads])

    @property
    def rows(self) -> int:
        return self.read.shape[1]

    def lists(self, head: int) -> list[np.ndarray]:
        """The slots that each row of one key-value head reads."""
        starts = self.starts[head * self.rows : (head + 1) * self.rows + 1]
        return np.split(self.slots[starts[0] : starts[-1]], starts[1:-1] - starts[0])

    def settle(self, context: torch.Tensor) -> None:
        """Show the policy what was read, [n, heads * head_dim]; what it makes of that is written in its place."""
        attention, cache = self.attention, self.attention.segment.cache
        assert cache is not None
        if self.weights is None:
            return
        kv_heads, n, slots = self.read.shape
        every = torch.zeros(kv_heads, len(self.weights), n, slots, dtype=torch.float32, device="cpu")
        for group, weights in enumerate(self.weights):
            every[:, group][torch.from_numpy(self.read)] = weights
        attention.weights, attention.mass = every.flatten(0, 1), self.mass
        attention.context = context.view(n, -1, context.shape[1] // self.mass.shape[1]).clone()
        context.copy_(settle(cache.policy, attention).reshape(context.shape))
