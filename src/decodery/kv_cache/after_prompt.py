"""Base class of policies that compress the prompt once, after it was read; later tokens are all kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.models.torch.rope import turns
from decodery.step.cache_policy import CachePolicy, State, best, entries

from .selecting import precise

SPARE = 256
"""Free slots of memory that are left after the kept tokens of a prompt, for new tokens."""


@dataclass(frozen=True)
class Compressing(CachePolicy):
    """Class B: a prompt is read in full and then compressed; later tokens are all kept."""

    @abstractmethod
    def watched(self, prompt: int) -> int:
        """Number of last queries of the prompt that the scores are computed from."""

    @abstractmethod
    def scores(self, seen: Prompt) -> np.ndarray:
        """[kv_heads, prompt] scores of the prompt's tokens in a layer; inf for tokens that must be kept."""

    def budgets(self, layers: int, length: int) -> list[int]:
        """Number of tokens, of `length`, that each key-value head keeps, by layer."""
        return [entries(getattr(self, "budget"), length)] * layers  # noqa: B009

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return AfterPrompt(self, model.config, prompt)


@dataclass(eq=False)
class Prompt:
    """Queries, keys and values of a prompt in one layer, after it was read.

    Attributes:
        queries: [heads, rows, head_dim] of its last rows, scaled, as attention used them.
        at: [rows] positions of these rows.
        keys: [kv_heads, prompt, head_dim].
        values: [kv_heads, prompt, head_dim].
    """

    config: ModelConfig
    layer: int
    queries: torch.Tensor
    at: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor

    def received(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        """[kv_heads, group, rows, prompt] causal attention weights of the queries over the prompt's keys.

        Args:
            queries: Other queries to use in their place, which attend to the whole prompt.
        """
        kv_heads, length = self.keys.shape[:2]
        asking = self.queries if queries is None else queries
        grouped = asking.reshape(kv_heads, -1, *asking.shape[1:])
        scores = torch.einsum("kgrd,ksd->kgrs", grouped, self.keys)
        if queries is None:
            future = torch.arange(length, device="cpu") > torch.from_numpy(self.at)[:, None]
            scores = scores.masked_fill(future.to(scores.device), -torch.inf)
        return scores.softmax(dim=-1)

    def turned(self, rows: torch.Tensor, by: np.ndarray | int) -> torch.Tensor:
        """Rotate rows [..., rows, head_dim] by `by` positions."""
        return turned(self.config, self.layer, rows, by)


def turned(config: ModelConfig, layer: int, rows: torch.Tensor, by: np.ndarray | int) -> torch.Tensor:
    """Rotate a layer's queries or keys [..., rows, head_dim] by `by` positions."""
    cos, sin = (part.to(rows) for part in angles(config, layer, np.broadcast_to(by, rows.shape[-2:-1])))
    # Rows of latent attention are rotated only in their last channels.
    plain = 0 if config.latent is None else config.latent.rank
    first, second = rows[..., plain:].chunk(2, dim=-1)
    cos, sin = (part[:, : first.shape[-1]] for part in (cos, sin))
    return torch.cat((rows[..., :plain], first * cos - second * sin, second * cos + first * sin), dim=-1)


def angles(config: ModelConfig, layer: int, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [n, head_dim / 2] float64 of a layer's rotation at positions, without scale."""
    # The rows already contain the scale factor of the rotary embedding.
    each = turns(config.layer_rope(layer), config.head_dim).double()
    found = torch.from_numpy(positions.astype(np.float64))[:, None] * each
    return found.cos(), found.sin()


class Noting(State):
    """Records the last `watched` queries of a prompt by layer, in parts [rows, heads, head_dim].

    Attributes:
        settled: Whether the prompt is read and processed.
    """

    def __init__(self, config: ModelConfig, prompt: int, watched: int) -> None:
        super().__init__(config, prompt)
        self.settled = False
        self._first = self.untouched = prompt - min(watched, prompt)
        self._queries: dict[int, list[torch.Tensor]] = {}
        self._gone: dict[int, int] = {}
        self._read: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the queries."""
        noted = [each for parts in self._queries.values() for each in parts]
        return sum(each.nbytes for each in (*noted, *(queries for _, queries in self._read.values())))

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        return 0 if self.settled else max(self._query_bytes(cache, self.prompt - self._first) - self.bytes, 0)

    def _query_bytes(self, cache: KVCache, rows: int) -> int:
        """Bytes of the queries of so many rows."""
        numbers = len(self.full_layers) * rows * self.config.num_heads * self.config.head_dim
        # Never in fewer bits than float32 on the CPU, whatever caches hold.
        return numbers * max(cache.pages.nothing.dtype.itemsize, 4)

    def wanted(self, segment: Segment) -> bool:
        return not self.settled and bool(segment.positions.max(initial=-1) >= self._first)

    def select(self, attention: Attention) -> np.ndarray | None:
        if not self.settled:
            rows = np.flatnonzero(attention.segment.positions >= self._first)
            self._read[attention.layer] = rows, attention.queries[torch.from_numpy(rows)].clone()
        return None

    def kept(self, cache: KVCache, rows: Sequence[int], layers: Sequence[int] | None) -> None:
        if self.settled:
            return
        for layer in [*self._read]:
            # Layer by layer, so that two copies are there of one layer's alone.
            read, queries = self._read.pop(layer)
            kept = np.isin(read, np.asarray(rows))
            self._queries.setdefault(layer, []).append(queries[torch.from_numpy(kept)])
            self._noted(layer)
        if cache.next_position >= self.prompt:
            self._settle(cache)
            self._queries, self.settled = {}, True

    def _noted(self, layer: int) -> None:
        """Queries of more rows of a layer's prompt are known."""

    def _let_go(self, layer: int, count: int) -> None:
        """Forget the first queries of a layer that are still noted."""
        self._queries[layer] = [torch.cat(self._queries[layer])[count:].clone()]
        self._gone[layer] = self._gone.get(layer, 0) + count

    def cut(self, cache: KVCache) -> None:
        self._read = {}
        known = max(cache.next_position - self._first, 0)
        if not known:
            self._gone = {}
        gone = max(self._gone.values(), default=0)
        if not self.settled and known < gone:
            raise ValueError(f"queries of the first {self._first + gone} tokens are gone, so that these cannot be cut")
        self._queries = {layer: [torch.cat(parts)[: known - gone]] for layer, parts in self._queries.items()}

    @abstractmethod
    def _settle(self, cache: KVCache) -> None:
        """Process the prompt; called once, after it was read."""


class AfterPrompt(Noting):
    """Drops the tokens of a prompt that are not kept, after it was read."""

    def __init__(self, method: Compressing, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt, method.watched(prompt))
        self.method = method

    def _settle(self, cache: KVCache) -> None:
        budgets = self.method.budgets(self.config.num_layers, cache.length)
        for layer, parts in self._queries.items():
            keys, values = cache.view(layer)
            queries = precise(torch.cat(parts)).transpose(0, 1)
            at = np.arange(self._first, self._first + queries.shape[1])
            if budgets[layer] < keys.shape[1]:
                seen = Prompt(self.config, layer, queries, at, precise(keys), precise(values))
                retain(cache, layer, best(self._scores(seen), budgets[layer]))
        cache.shrink(SPARE)

    def _scores(self, seen: Prompt) -> np.ndarray:
        return self.method.scores(seen)


def observing(window: int, budget: float, prompt: int) -> int:
    """Size of the observation window: `window` last tokens of the prompt, at most half the budget.

    Without this limit, the window alone could fill the budget of a short prompt.
    """
    return min(window, max(entries(budget, prompt) // 2, 1))


def retain(cache: KVCache, layer: int, chosen: np.ndarray) -> np.ndarray:
    """Keep only the chosen slots of each head in a layer.

    Args:
        cache: The cache.
        layer: The layer.
        chosen: [kv_heads, slots] bool, the same number for every head.

    Returns:
        The chosen slots, [kv_heads, m], ascending.
    """
    slots = np.nonzero(chosen)[1].reshape(len(chosen), -1)
    cache.retain(layer, slots)
    return slots


def pooled(scores: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """[kv_heads, n] scores, pooled by mean or maximum over `kernel` neighbouring tokens."""
    pool = avg_pool1d if kind == "mean" else max_pool1d
    found: torch.Tensor = pool(scores, kernel, stride=1, padding=kernel // 2)
    return found
