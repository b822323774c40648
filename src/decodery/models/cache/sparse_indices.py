"""The slots each row of each key-value head reads in one layer, as lists for those who gather them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from ..batch import Segment
from ..torch.attention import visible
from .attention_policy import Attention, AttentionPolicy, acting, reads, settle


@dataclass(eq=False)
class SparseIndices:
    """What one segment reads in one layer.

    Attributes:
        policy: What selects, None where nothing does.
        read: [kv_heads, n, slots] bool.
        slots: The ones that are read, row after row of head after head, int32.
        starts: [kv_heads * n + 1] int32, where each row's begin.
        weights: [heads / kv_heads, len(slots)] and mass [n, heads], written by whoever attends, where the policy wants
            them.
    """

    policy: AttentionPolicy | None
    attention: Attention
    read: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    weights: torch.Tensor | None
    mass: torch.Tensor | None

    @classmethod
    def of(cls, segment: Segment, layer: int, queries: torch.Tensor, window: int | None) -> SparseIndices | None:
        """To be called when the rows' keys and values are written.

        Args:
            segment, layer: The rows, and where.
            queries: [n, heads, head_dim], scaled.
            window: Of the layer.

        Returns:
            None where the rows read all that they see and nothing else is wanted.
        """
        cache, policy = segment.cache, acting(segment, window)
        assert cache is not None
        kv_heads = cache.pages.nothing.shape[2]
        nothing = queries[:0]
        attention = Attention(layer, segment, queries, nothing, nothing, np.zeros((0, 0), bool), segment.bias(layer))
        # They are read from the cache at their first use.
        del attention.keys, attention.values
        attention.seen = visible(segment, layer, window)
        chosen = None if policy is None else policy.select(attention)
        sums = policy is not None and policy.summed_from(segment) is not None
        weighs = attention.bias is not None or sums or (policy is not None and policy.observes)
        masses = weighs or (policy is not None and policy.merges)
        if chosen is None and not masses and attention.seen.ndim == 2:
            return None
        read = reads(chosen, attention, kv_heads)
        counts = read.reshape(-1, read.shape[-1]).sum(axis=1)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        slots = np.concatenate([np.flatnonzero(head) % read.shape[-1] for head in read]).astype(np.int32)
        n, heads = queries.shape[:2]
        weights = torch.empty(heads // kv_heads, len(slots), dtype=torch.float32, device="cpu") if weighs else None
        mass = torch.empty(n, heads, dtype=torch.float32, device="cpu") if masses else None
        return cls(policy, attention, read, slots, starts, weights, mass)

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
        attention = self.attention
        if self.mass is None:
            return
        kv_heads, n, slots = self.read.shape
        if self.weights is not None:
            every = torch.zeros(kv_heads, len(self.weights), n, slots, dtype=torch.float32, device="cpu")
            for group, weights in enumerate(self.weights):
                every[:, group][torch.from_numpy(self.read)] = weights
            attention.weights = every.flatten(0, 1)
        attention.mass = self.mass
        attention.context = context.view(n, -1, context.shape[1] // self.mass.shape[1]).clone()
        context.copy_(settle(self.policy, attention).reshape(context.shape))
