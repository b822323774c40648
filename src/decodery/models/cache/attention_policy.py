"""What attention reads: the hook by which a cache's policy decides, and sees what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from decodery.core.abstract import Contract

if TYPE_CHECKING:
    from ..batch import Segment
    from .cache import KVCache
    from .kernel_policy import KernelPolicy
    from .pages import PageTable

PAID_UNIT = 2.0**40
"""As in csrc/state.h."""


@dataclass(eq=False)
class Attention:
    """One segment's attention in one layer.

    Slots are those of its cache: content, then tentative rows.

    Attributes:
        layer: The layer's number.
        segment: The rows.
        queries: [n, heads, head_dim], normed, turned and scaled.
        keys, values: [kv_heads, slots, head_dim], the rows' own included. Where attention is computed in pages they are
            read from these at their first use.
        seen: [n, slots] bool, what mask, causal order and window let each row see, or [kv_heads, n, slots] where some
            heads have lost slots. Afterwards weights: [heads, n, slots], 0 where nothing was read.
        bias: [n, slots] float64, what is added to the scores of all heads, None for nothing.
        mass: [n, heads], the logarithm of the sum of exponentials that the weights were divided by.
        context: [n, heads, head_dim], what was read.
    """

    layer: int
    segment: Segment
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    seen: np.ndarray
    bias: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    context: torch.Tensor | None = None

    def __getattr__(self, name: str) -> torch.Tensor:
        cache = self.segment.cache
        if name not in ("keys", "values") or cache is None:
            raise AttributeError(name)
        # Policies compute in the precision of the queries, whatever the cache holds.
        self.keys, self.values = (each.to(self.queries.dtype) for each in cache.view(self.layer))
        return self.keys if name == "keys" else self.values

    @property
    def seen_by_any(self) -> np.ndarray:
        """[n, slots] bool, what each row sees in some head at least."""
        if self.seen.ndim == 2:
            return self.seen
        return np.asarray(self.seen.any(axis=0))


class AttentionPolicy(Contract):
    """Decides which slots of a cache attention reads.

    Held by the cache, in the same way whatever computes attention. What is tentative may be forgotten again: a policy
    counts nothing before `kept` says that it has become content. A row always reads itself.

    Attributes:
        observes: Whether `observe` wants attention's weights.
        merges: Whether `merge` has anything to add.
        windows: Whether it acts in layers with a sliding window.
        most: How many slots of a layer it leaves, however long the text is; None where that is not known.
        untouched: How many of the first tokens a cache holds as it does without a policy, with nothing noted beside it.
        anew: Whether what it leaves follows from a text's tokens alone, however they are read, so that a text can be
            read again.
    """

    observes: bool = False
    merges: bool = False
    windows: bool = True
    most: int | None = None
    untouched: int = 0
    anew: bool = False

    @property
    def bytes(self) -> int:
        """Of what it holds beside the cache."""
        return 0

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """Pages that it holds beside the cache's."""
        return ()

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        """Bytes that it takes, at most at once, beside what it holds and the cache's pages.

        Args:
            cache: The cache.
            slots: How many the cache will have.
            rows: The most that are tentative at once after the prompt.
            chunk: The most of the prompt that are.
        """
        return 0

    def wanted(self, segment: Segment) -> bool:
        """Whether it decides or observes anything in a pass over these rows.

        Elsewhere attention is what it is without a policy.
        """
        return True

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        """What kernels do for these rows in place of `select` and `merge`; None where they cannot."""
        return None

    def summed_from(self, segment: Segment) -> int | None:
        """The first row whose weights are summed for `take_sums`, None for none."""
        return None

    def take_sums(self, layer: int, paid: np.ndarray) -> None:
        """Take what tentative rows from `summed_from` on pay to each slot: [kv_heads, slots] float64.

        Summed over rows and the heads of a group.
        """

    def select(self, attention: Attention) -> np.ndarray | None:
        """Which of the slots that are seen are read: [kv_heads, n, slots] or [n, slots] bool.

        None for all of them.
        """
        return None

    def also(self, attention: Attention) -> np.ndarray | None:
        """Which slots of the cache `merge` reads beside those that are selected: [n, slots] bool.

        None for none.
        """
        return None

    def observe(self, attention: Attention) -> None:
        """Look at `attention.weights`, of rows that are still tentative."""

    def merge(self, attention: Attention) -> torch.Tensor:
        """What goes on as the rows' context [n, heads, head_dim]: joined, by `mass`, with what lies elsewhere."""
        assert attention.context is not None
        return attention.context

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        """These tentative rows have become content of the cache, as `KVCache.keep` says; the others are gone.

        What it no longer wants it may take out of the cache here.

        Args:
            cache: The cache.
            rows, layers: See `KVCache.keep`.
        """

    def cut(self, cache: KVCache) -> None:
        """The content of the cache was cut back."""

    def fork(self) -> Self:
        """What a fork of the cache gets; a policy without memory of its own can be shared."""
        return self


def acting(segment: Segment, window: int | None) -> AttentionPolicy | None:
    """The policy of a segment's cache where it has something to say in a layer.

    Policies of caches leave layers with a window alone: rows of these see little, and nothing before it.

    Args:
        segment: The rows.
        window: Of the layer, None where it has none.
    """
    policy = None if segment.cache is None else segment.cache.policy
    if policy is None or (window is not None and not policy.windows) or not policy.wanted(segment):
        return None
    return policy


def reads(chosen: np.ndarray | None, attention: Attention, kv_heads: int) -> np.ndarray:
    """[kv_heads, n, slots] bool: what each row of each key-value head reads of what was chosen."""
    seen = attention.seen if chosen is None else attention.seen & chosen
    seen = np.broadcast_to(seen, (kv_heads, *seen.shape[-2:])).copy()
    n, slots = seen.shape[1:]
    seen[:, np.arange(n), slots - n + np.arange(n)] = True
    return seen


def settle(policy: AttentionPolicy | None, attention: Attention) -> torch.Tensor:
    """Show a policy what was read; returns the context that goes on."""
    assert attention.context is not None
    if attention.bias is not None:
        _steer(attention, attention.bias)
    if policy is None:
        return attention.context
    if (first := policy.summed_from(attention.segment)) is not None and attention.weights is not None:
        # Integers, which no order of the sum changes: as kernels do it.
        weights = (attention.weights[:, first:] * PAID_UNIT).to(torch.int64).unflatten(0, (len(attention.keys), -1))
        policy.take_sums(attention.layer, weights.sum(dim=(1, 2)).cpu().numpy() / PAID_UNIT)
    if policy.observes:
        policy.observe(attention)
    return policy.merge(attention) if policy.merges else attention.context


def _steer(attention: Attention, bias: torch.Tensor) -> None:
    """Weights, mass and context as if `bias` had been added before the softmax. Rows without any stay to the bit.

    In double precision, so that rounding to that of the rows leaves nothing of what else is in the pass.
    """
    weights, mass, context = attention.weights, attention.mass, attention.context
    assert weights is not None and mass is not None and context is not None
    bias = bias.to(weights.device)
    most = bias.amax(dim=1, keepdim=True)
    weighed = weights.double() * (bias - most).exp()
    total = weighed.sum(dim=-1, keepdim=True)
    steered = weighed / total
    values = attention.values.double()
    found = torch.einsum("kgns,ksd->nkgd", steered.unflatten(0, (len(values), -1)), values).flatten(1, 2)
    own = (bias != 0).any(dim=1)
    shift = total[..., 0].log().T + most
    attention.weights = torch.where(own[None, :, None], steered.to(weights.dtype), weights)
    attention.mass = torch.where(own[:, None], (mass + shift).to(mass.dtype), mass)
    attention.context = torch.where(own[:, None, None], found.to(context.dtype), context)
