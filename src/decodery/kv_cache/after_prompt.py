"""Policies that let go once, when the prompt is read; what is written afterwards is kept."""

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
"""Slots of memory that stay after what was kept of a prompt, for what will be written."""


@dataclass(frozen=True)
class Compressing(CachePolicy):
    """Class B: a prompt is read in full and then compressed; what is written afterwards stays."""

    @abstractmethod
    def watched(self, prompt: int) -> int:
        """How many of a prompt's last queries the scores are made of."""

    @abstractmethod
    def scores(self, seen: Prompt) -> np.ndarray:
        """How much each token of the prompt is worth in a layer: [kv_heads, prompt], inf for what must stay."""

    def budgets(self, layers: int, length: int) -> list[int]:
        """How many of `length` tokens each key-value head of each layer keeps."""
        return [entries(getattr(self, "budget"), length)] * layers  # noqa: B009

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return AfterPrompt(self, model.config, prompt)


@dataclass(eq=False)
class Prompt:
    """What is known of a prompt in one layer when it is read.

    Attributes:
        queries: [heads, rows, head_dim] of its last rows, scaled, as attention used them.
        at: [rows] their positions.
        keys, values: [kv_heads, prompt, head_dim].
    """

    config: ModelConfig
    layer: int
    queries: torch.Tensor
    at: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor

    def received(self, queries: torch.Tensor | None = None) -> torch.Tensor:
        """[kv_heads, group, rows, prompt] what each query pays each key, those of its future left out.

        Args:
            queries: Others in their place, which see the whole prompt.
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
        """Rows [..., rows, head_dim] as they would be `by` positions further on."""
        return turned(self.config, self.layer, rows, by)


def turned(config: ModelConfig, layer: int, rows: torch.Tensor, by: np.ndarray | int) -> torch.Tensor:
    """A layer's queries or keys [..., rows, head_dim] as they would be `by` positions further on."""
    cos, sin = (part.to(rows) for part in angles(config, layer, np.broadcast_to(by, rows.shape[-2:-1])))
    # Of rows that meet latents only the end is turned.
    plain = 0 if config.latent is None else config.latent.rank
    first, second = rows[..., plain:].chunk(2, dim=-1)
    cos, sin = (part[:, : first.shape[-1]] for part in (cos, sin))
    return torch.cat((rows[..., :plain], first * cos - second * sin, second * cos + first * sin), dim=-1)


def angles(config: ModelConfig, layer: int, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [n, head_dim / 2] float64 of a layer's rotation at these positions, of length 1."""
    # What a rope multiplies both with is in the rows already.
    each = turns(config.layer_rope(layer), config.head_dim).double()
    found = torch.from_numpy(positions.astype(np.float64))[:, None] * each
    return found.cos(), found.sin()


class Noting(State):
    """Notes a prompt's last `watched` queries until it is read.

    They are held by layer, in parts [rows, heads, head_dim].

    Args:
        settled: Whether that is done.
    """

    def __init__(self, config: ModelConfig, prompt: int, watched: int) -> None:
        super().__init__(config, prompt)
        self.settled = False
        self._first = prompt - min(watched, prompt)
        self._queries: dict[int, list[torch.Tensor]] = {}
        self._read: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

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
        for layer, (read, queries) in self._read.items():
            kept = np.isin(read, np.asarray(rows))
            self._queries.setdefault(layer, []).append(queries[torch.from_numpy(kept)])
        self._read = {}
        if cache.next_position >= self.prompt:
            self._settle(cache)
            self._queries, self.settled = {}, True

    def cut(self, cache: KVCache) -> None:
        self._read = {}
        known = max(cache.next_position - self._first, 0)
        self._queries = {layer: [torch.cat(parts)[:known]] for layer, parts in self._queries.items()}

    @abstractmethod
    def _settle(self, cache: KVCache) -> None:
        """Done once, when the prompt is read."""


class AfterPrompt(Noting):
    """Lets go of the rest of a prompt when it is read."""

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
                retain(cache, layer, best(self.method.scores(seen), budgets[layer]))
        cache.shrink(SPARE)


def observing(window: int, budget: float, prompt: int) -> int:
    """How many last tokens of a prompt observe the others and stay: `window`, at most half the budget.

    In a short prompt they would otherwise be all that stays, or more.
    """
    return min(window, max(entries(budget, prompt) // 2, 1))


def retain(cache: KVCache, layer: int, chosen: np.ndarray) -> np.ndarray:
    """Let each head of a layer keep the slots it has chosen [kv_heads, slots], as many as every other.

    Returns:
        Which they were, [kv_heads, m] in ascending order.
    """
    slots = np.nonzero(chosen)[1].reshape(len(chosen), -1)
    cache.retain(layer, slots)
    return slots


def pooled(scores: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """[kv_heads, n] scores, each the mean or the largest of its neighbourhood of `kernel` tokens."""
    pool = avg_pool1d if kind == "mean" else max_pool1d
    found: torch.Tensor = pool(scores, kernel, stride=1, padding=kernel // 2)
    return found
