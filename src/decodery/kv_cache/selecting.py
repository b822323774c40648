"""Base class of policies that keep all tokens, and let each row after the prompt select those that it reads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch

from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.cache.kernel_policy import Choice, KernelPolicy, SideStore, whole
from decodery.models.cache.page_pool import SLOTS, MappedPool
from decodery.models.cache.pages import PageTable
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.models.torch.portable import lane_sum
from decodery.step.cache_policy import CachePolicy, State, entries


@dataclass(frozen=True)
class Selective(CachePolicy):
    """Class A: no token is dropped, prompts are read in full, and later rows select tokens."""

    @property
    def provides(self) -> Provides:
        return Provides(layer_plans=True, keys=True)

    @abstractmethod
    def choose(self, asked: Asked) -> np.ndarray:
        """Select the slots that each row reads: [kv_heads, rows, slots] bool.

        A row's selection depends only on slots that the row may attend to.
        """

    @abstractmethod
    def dense(self, layer: int) -> bool:
        """Whether the rows of a layer read all tokens."""

    @abstractmethod
    def choice(self, config: ModelConfig, at: np.ndarray, store: SideStore | None) -> Choice | None:
        """The selection as the native kernels compute it, in place of `choose`; None where they cannot.

        Args:
            config: Configuration of the model.
            at: [rows] positions.
            store: The side store of earlier rows of the same text, None for the first ones.
        """

    def layers(self, config: ModelConfig) -> np.ndarray:
        """[layers] bool, true for layers whose rows select."""
        every = range(config.num_layers)
        return np.array([not self.dense(layer) and config.window(layer) is None for layer in every])

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Selecting(self, model.config, prompt)


class Selecting(State):
    """State of the policy: it covers only full pages of content, so rejected rows leave nothing in it."""

    anew = True

    def __init__(self, method: Selective, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt)
        self.method, self.untouched = method, prompt
        self._store: SideStore | None = None

    @property
    def tables(self) -> tuple[PageTable, ...]:
        return () if self._store is None else (self._store.pages,)

    def fork(self) -> Selecting:
        clone = Selecting(self.method, self.config, self.prompt)
        clone._store = None if self._store is None else self._store.fork()
        return clone

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        if not isinstance(cache.pages.pool, MappedPool) or not whole(cache):
            return 0
        choice = self.method.choice(self.config, np.zeros(1, dtype=np.int64), self._store)
        self._store = self._store if choice is None else choice.store
        return 0 if choice is None else choice.store.more_for(slots // SLOTS)

    def cut(self, cache: KVCache) -> None:
        if self._store is not None:
            self._store.cut(cache.length // SLOTS)

    def wanted(self, segment: Segment) -> bool:
        return bool(segment.positions.max(initial=-1) >= self.prompt)

    def by_kernel(self, segment: Segment) -> KernelPolicy | None:
        cache = segment.cache
        assert cache is not None
        choice = self.method.choice(self.config, segment.positions, self._store) if whole(cache) else None
        if choice is None:
            return None
        self._store = choice.store
        counts = np.where(segment.positions >= self.prompt, choice.counts, 0).astype(np.int32)
        return KernelPolicy(replace(choice, counts=counts))

    def select(self, attention: Attention) -> np.ndarray | None:
        rows = np.flatnonzero(attention.segment.positions >= self.prompt)
        layer = attention.layer
        if not len(rows) or self.method.dense(layer):
            return None
        asked = Asked(attention, rows)
        kv_heads, slots = len(attention.keys), attention.seen.shape[-1]
        read = np.ones((kv_heads, len(attention.segment), slots), dtype=bool)
        read[:, rows] = self.method.choose(asked)
        return read


class Asked:
    """The inputs of a selection.

    Attributes:
        own: [rows] slots of the rows themselves.
        queries: [kv_heads, rows, group, head_dim].
        keys: [kv_heads, slots, head_dim].
        seen: [rows, slots] bool, the slots that each row may attend to.
        positions: [slots] positions of the slots.
        at: [rows] positions of the rows.
        layer: Index of the layer.
    """

    def __init__(self, attention: Attention, rows: np.ndarray) -> None:
        cache, segment = attention.segment.cache, attention.segment
        assert cache is not None
        n, heads, dim = attention.queries.shape
        kv_heads, slots = len(attention.keys), attention.seen.shape[-1]
        self.layer, self.rows = attention.layer, rows
        self.content = slots - segment.retained - n
        self.own = slots - n + rows
        grouped = precise(attention.queries[torch.from_numpy(rows)]).reshape(
            len(rows), kv_heads, heads // kv_heads, dim
        )
        self.queries = grouped.transpose(0, 1)
        self.keys = precise(attention.keys)
        # A slot that some heads have dropped may still be read by others.
        self.seen = attention.seen_by_any[rows]
        self.positions = np.asarray(cache.positions[attention.layer, :slots], dtype=np.int64)
        self.at = np.asarray(segment.positions[rows], dtype=np.int64)

    def budgets(self, budget: float) -> np.ndarray:
        """[rows] maximum number of tokens that each row reads."""
        return allowed(budget, self.at)


def allowed(budget: float, at: np.ndarray) -> np.ndarray:
    """[rows] maximum number of tokens that rows at these positions read."""
    return np.array([entries(budget, position + 1) for position in at.tolist()])


def precise(values: torch.Tensor) -> torch.Tensor:
    """Convert to float32, unless the precision is higher."""
    return values if values.dtype == torch.float64 else values.float()


def dots(queries: torch.Tensor, keys: torch.Tensor) -> np.ndarray:
    """[kv_heads, rows, group, m] products of queries and keys.

    Queries are [kv_heads, rows, group, d], keys [kv_heads, m, d]. The order of summation is fixed, so that a row gets
    the same bits whatever other rows are in the pass.
    """
    found: np.ndarray = lane_sum(queries[:, :, :, None] * keys[:, None, None]).cpu().numpy()
    return found
