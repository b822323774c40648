"""Expected Attention: tokens are scored by the attention that future queries are expected to pay them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import require_budget

from .after_prompt import AfterPrompt, Compressing, Prompt, angles, turned

_BLOCK = 64
"""Queries that are added up at once, so that sums do not depend on how a prompt is cut into passes."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and spread of a layer's queries before rotation.

    Attributes:
        count: Number of queries.
        mean: [heads, head_dim] float64.
        spread: [heads, head_dim, head_dim] float64, the sum of products of their differences from the mean.
    """

    count: int
    mean: torch.Tensor
    spread: torch.Tensor

    @classmethod
    def of(cls, queries: torch.Tensor) -> Moments:
        """Those of queries [heads, n, head_dim]."""
        mean = queries.mean(dim=1)
        apart = queries - mean[:, None]
        return cls(queries.shape[1], mean, apart.transpose(1, 2) @ apart)

    def joined(self, other: Moments) -> Moments:
        """Those of both."""
        count, step = self.count + other.count, other.mean - self.mean
        between = step[:, :, None] * step[:, None, :] * (self.count * other.count / count)
        return Moments(count, self.mean + step * (other.count / count), self.spread + other.spread + between)

    @property
    def bytes(self) -> int:
        return self.mean.nbytes + self.spread.nbytes


@register(
    "expected-attention",
    paper="Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution (2025)",
    guarantee="lossy: most of the prompt is dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class ExpectedAttention(Compressing):
    """Keeps the prompt tokens that expected future queries attend to, weighted by value norms.

    Queries before rotation are assumed to be normally distributed, with the mean and covariance of the prompt's own
    queries after its first `sinks` tokens. Rotations are averaged over the next `future` positions. The score of a key
    is the logarithm of the expected exponential of its product with such a query. The softmax of these scores, over all
    keys but the first `sinks`, is averaged over the heads of a group, raised by `epsilon` and multiplied by the norm of
    the value. The prompt need not end with the question. Class B.

    Attributes:
        budget: See `CachePolicy`, of the prompt.
        future: Positions over which rotations are averaged.
        sinks: First tokens that are always kept.
        epsilon: Added to the expected attention before it is weighted by the value's norm.
    """

    budget: float = 0.5
    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        require_budget("expected-attention", self.budget)
        if self.future < 1 or self.sinks < 0 or self.epsilon < 0:
            raise SettingsError("expected-attention needs future >= 1, sinks >= 0 and epsilon >= 0")

    def watched(self, prompt: int) -> int:
        return prompt

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Expecting(self, model.config, prompt)

    def skipped(self, prompt: int) -> int:
        """How many of the first queries do not count."""
        return self.sinks if prompt > self.sinks + 1 else 0

    def scores(self, seen: Prompt) -> np.ndarray:
        still = seen.turned(seen.queries.double(), -seen.at)
        return self.expected(seen, Moments.of(still[:, self.skipped(len(seen.at)) :]))

    def expected(self, seen: Prompt, moments: Moments) -> np.ndarray:
        """`scores` by the mean and the spread of the prompt's queries."""
        kv_heads, _, dim = seen.keys.shape
        mean, covariance = self.outlook(seen, moments)
        # Sinks are always kept and receive most of the attention, so the softmax leaves them out.
        keys, values = (part[:, self.sinks :].double() for part in (seen.keys, seen.values))
        grouped = mean.reshape(kv_heads, -1, dim)
        spread = covariance.reshape(kv_heads, -1, dim, dim)
        products = torch.einsum("kgd,ksd->kgs", grouped, keys)
        products += torch.einsum("ksd,kgde,kse->kgs", keys, spread, keys) / 2
        paid = products.softmax(dim=-1).mean(dim=1)
        scores = ((paid + self.epsilon) * values.norm(dim=-1)).cpu().numpy()
        return np.concatenate((np.full((kv_heads, seen.keys.shape[1] - scores.shape[1]), np.inf), scores), axis=1)

    def outlook(self, seen: Prompt, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [heads, head_dim] and covariance [heads, head_dim, head_dim] of the expected queries, scaled."""
        mean, covariance = moments.mean, moments.spread / moments.count
        cos, sin = angles(seen.config, seen.layer, seen.keys.shape[1] + np.arange(self.future))
        along, across = (torch.diag(each.double().mean(dim=0)) for each in (cos, sin))
        turn = torch.cat((torch.cat((along, -across), dim=1), torch.cat((across, along), dim=1)))
        return mean @ turn.T, turn @ covariance @ turn.T


class Expecting(AfterPrompt):
    """State of the policy: mean and spread of the prompt's queries, and queries of the block at hand."""

    method: ExpectedAttention

    def __init__(self, method: ExpectedAttention, config: ModelConfig, prompt: int) -> None:
        super().__init__(method, config, prompt)
        self._moments: dict[int, Moments] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the queries and their moments."""
        return super().bytes + sum(each.bytes for each in self._moments.values())

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        if self.settled:
            return 0
        config, layers = self.config, max(len(self.full_layers), 1)
        moments = layers * config.num_heads * (config.head_dim + 1) * config.head_dim * torch.float64.itemsize
        # Those of a block that is not whole yet and of a pass, two of them once more in one layer.
        queries = self._query_bytes(cache, min(self.prompt, _BLOCK - 1 + chunk)) // layers * (layers + 2)
        return max(moments + queries - self.bytes, 0)

    def _noted(self, layer: int) -> None:
        queries, start = torch.cat(self._queries[layer]), self._gone.get(layer, 0)
        whole = len(queries) // _BLOCK * _BLOCK
        for first in range(0, whole, _BLOCK):
            self._add(layer, start + first, queries[first : first + _BLOCK])
        if whole:
            self._let_go(layer, whole)

    def _add(self, layer: int, start: int, queries: torch.Tensor) -> None:
        """Count queries [n, heads, head_dim] of the prompt's tokens from `start` on."""
        skipped = max(self.method.skipped(self.prompt) - start, 0)
        if skipped < len(queries):
            at = np.arange(start + skipped, start + len(queries))
            own = Moments.of(turned(self.config, layer, queries[skipped:].double().transpose(0, 1), -at))
            known = self._moments.get(layer)
            self._moments[layer] = own if known is None else known.joined(own)

    def cut(self, cache: KVCache) -> None:
        super().cut(cache)
        if not self._gone:
            self._moments = {}

    def _settle(self, cache: KVCache) -> None:
        super()._settle(cache)
        self._moments = {}

    def _scores(self, seen: Prompt) -> np.ndarray:
        self._add(seen.layer, self._gone.get(seen.layer, 0), seen.queries.transpose(0, 1))
        return self.method.expected(seen, self._moments[seen.layer])
