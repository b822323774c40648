"""ActQKV: blocks are selected by a probe query, a mean of a window's queries that favours unusual ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import CachePolicy, best, entries, require_budget, shared_out

from .after_prompt import Noting


@register(
    "actqkv",
    paper="Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs Inference (2025)",
    guarantee="lossy: rows read some blocks of the text; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class ActQKV(CachePolicy):
    """Reads the first and last tokens, and the blocks with the largest scores for a probe query.

    No token is dropped. A block of the prompt is represented by those `representatives` of its keys that have the
    largest mean product with the block's own queries; a later block by all of its keys. The heads of a group select
    together. At the end of the prompt, layers whose blocks score evenly get more of the budget, in proportion to the
    entropy of the softmax of the scores. Tokens are read at their original distances. Class G, here with the store in
    the cache.

    Only summaries of the paper and InfLLM's code were available: weights, entropies and representatives are our
    reading. In the paper the probe of a window uses all of its queries. Here a row uses no later queries, so that a
    text does not depend on how its prompt is split into passes.

    Attributes:
        budget: See `CachePolicy`, the mean over layers, rounded up to blocks of `block` tokens.
        block: Tokens per block.
        window: Tokens of the prompt per window. The probe of a row is made from the queries of its window up to its
            own; after the prompt it is the row's own query.
        probe: How queries are combined. "weighted": by the squared distance from the window's mean, in units of each
            channel's spread; "mean": as in InfLLM; "last": the row's own query.
        representatives: Keys that represent a block of the prompt.
        sinks: First tokens that are always read.
        recent: Share of the budget for the last tokens. Blocks of first and last tokens are always read, and at least
            one more.
    """

    budget: float = 2048
    block: int = 128
    window: int = 512
    probe: Literal["weighted", "mean", "last"] = "weighted"
    representatives: int = 4
    sinks: int = 128
    recent: float = 0.25

    def __post_init__(self) -> None:
        require_budget("actqkv", self.budget)
        if min(self.block, self.window, self.representatives) < 1 or self.sinks < 0 or not 0 <= self.recent <= 1:
            raise SettingsError(
                "actqkv needs block, window and representatives >= 1, sinks >= 0 and a recent between 0 and 1"
            )
        if self.probe not in ("weighted", "mean", "last"):
            raise SettingsError(f"actqkv: probe must be weighted, mean or last, not {self.probe!r}")

    @property
    def provides(self) -> Provides:
        return Provides(layer_plans=True, keys=True)

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        return Fetching(self, model.config, prompt)


class Fetching(Noting):
    """State of the policy: the prompt's queries, the keys that represent blocks, and layer budgets."""

    def __init__(self, method: ActQKV, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt, prompt)
        self.method = method
        # Probes are made of queries of a window, and blocks are represented by their own ones.
        self._span = lcm(method.window, method.block)
        self._picked: dict[int, np.ndarray] = {}
        self._entropies: dict[int, float] = {}
        self._budgets: dict[int, float] = {}

    def wanted(self, segment: Segment) -> bool:
        return True

    def select(self, attention: Attention) -> np.ndarray | None:
        layer, segment = attention.layer, attention.segment
        super().select(attention)
        assert segment.cache is not None
        slots, method = attention.seen.shape[-1], self.method
        places = np.asarray(segment.cache.positions[layer, :slots], dtype=np.int64)
        at = np.asarray(segment.positions, dtype=np.int64)
        worth = self._worth(attention, places)
        blocks, own = np.arange(worth.shape[-1]), at // method.block
        totals = np.array([self._total(layer, position) for position in at.tolist()])
        recent = np.maximum(np.rint(method.recent * totals).astype(int), 1)
        forced = (blocks >= ((at + 1 - recent) // method.block)[:, None]) | (blocks * method.block < method.sinks)
        visible = blocks <= own[:, None]
        if at[-1] == self.prompt - 1:
            free = worth[:, -1, ~forced[-1]]
            self._entropies[layer] = entropy(free) if free.shape[1] else 0.0
        counts = np.maximum(-(-totals // method.block), (forced & visible).sum(axis=1) + 1)
        chosen = best(np.where(forced, np.inf, worth), counts[None], np.broadcast_to(visible, worth.shape))
        found: np.ndarray = chosen[..., places // method.block]
        return found

    def _total(self, layer: int, position: int) -> int:
        """Number of tokens that a row reads."""
        budget = self.method.budget if position < self.prompt else self._budgets.get(layer, self.method.budget)
        return entries(budget, position + 1)

    def _worth(self, attention: Attention, places: np.ndarray) -> np.ndarray:
        """Scores [kv_heads, rows, blocks] of each block for each row, over the keys that the row may attend to."""
        method, kv_heads, seen = self.method, len(attention.keys), attention.seen_by_any
        history = self._history(attention)
        asking = self._asking(attention, history).to(attention.keys.device)
        answers = torch.einsum("krd,ksd->krs", asking, attention.keys.double()).cpu().numpy()
        inside = (places // method.block)[:, None] == np.arange(int(places.max()) // method.block + 1)
        worth = (np.where(seen, answers, 0.0) @ inside) / np.maximum(seen @ inside.astype(np.float64), 1.0)
        if history is not None:
            self._represent(attention, history)
        picked = self._picked.get(attention.layer)
        if picked is not None:
            # In the prompt, slots equal positions; a block that a row sees only in part is always read.
            chosen = np.take_along_axis(answers, picked.reshape(kv_heads, 1, -1), axis=2)
            worth[..., : picked.shape[1]] = chosen.reshape(*chosen.shape[:2], *picked.shape[1:]).mean(axis=-1)
        return worth

    def _history(self, attention: Attention) -> torch.Tensor | None:
        """[heads, m, head_dim] the queries of the prompt so far that are still noted, None after it."""
        if self.settled:
            return None
        layer = attention.layer
        parts = [*self._queries.get(layer, []), attention.queries]
        return torch.cat(parts)[: self.prompt - self._gone.get(layer, 0)].double().transpose(0, 1)

    def _noted(self, layer: int) -> None:
        gone = self._gone.get(layer, 0)
        known = gone + sum(map(len, self._queries[layer]))
        if (needed := known // self._span * self._span) > gone:
            self._let_go(layer, needed - gone)

    def more_for(self, cache: KVCache, slots: int, rows: int, chunk: int) -> int:
        if self.settled:
            return 0
        layers, noted = max(len(self.full_layers), 1), self._span - 1
        # Of one layer they are there together as well, and in double precision.
        queries = self._query_bytes(cache, min(self.prompt, noted + chunk)) // layers * (layers + 3)
        return max(queries - self.bytes, 0)

    def _asking(self, attention: Attention, history: torch.Tensor | None) -> torch.Tensor:
        """[kv_heads, rows, head_dim] probe of each row, summed over the heads of a group."""
        own = attention.queries.double().transpose(0, 1)
        if history is not None and self.method.probe != "last":
            first, gone = int(attention.segment.positions[0]), self._gone.get(attention.layer, 0)
            parts, size = [], self.method.window
            for begin in range(first // size * size, gone + history.shape[1], size):
                asked, weighted = history[:, begin - gone : begin - gone + size], self.method.probe == "weighted"
                parts.append(probes(asked, max(first - begin, 0), weighted))
            own = torch.cat([*parts, own[:, sum(part.shape[1] for part in parts) :]], dim=1)
        return own.unflatten(0, (len(attention.keys), -1)).sum(dim=1)

    def _represent(self, attention: Attention, history: torch.Tensor) -> None:
        """Choose the representative keys of the complete blocks of the prompt."""
        size, kv_heads, gone = self.method.block, len(attention.keys), self._gone.get(attention.layer, 0)
        whole, known = (gone + history.shape[1]) // size, self._picked.get(attention.layer)
        done = 0 if known is None else known.shape[1]
        if whole == done:
            return
        queries = history[:, done * size - gone : whole * size - gone].unflatten(1, (-1, size)).mean(dim=2)
        keys = attention.keys[:, done * size : whole * size].double().unflatten(1, (-1, size))
        grouped = queries.unflatten(0, (kv_heads, -1)).sum(dim=1)
        answers = torch.einsum("kbd,kbsd->kbs", grouped, keys).cpu().numpy()
        order = np.argsort(-answers, axis=-1, kind="stable")[..., : self.method.representatives]
        found = order + np.arange(done, whole)[:, None] * size
        self._picked[attention.layer] = found if known is None else np.concatenate((known, found), axis=1)

    def cut(self, cache: KVCache) -> None:
        super().cut(cache)
        whole = min(cache.next_position, self.prompt) // self.method.block
        self._picked = {layer: picked[:, :whole] for layer, picked in self._picked.items()}

    def _settle(self, cache: KVCache) -> None:
        share = entries(self.method.budget, self.prompt) / self.prompt
        if share >= 1:
            return
        # Where no layer has blocks to choose from, all get the same budget.
        shares = shared_out(np.array(list(self._entropies.values())) + 1e-9, share)
        for layer, own in zip(self._entropies, shares.tolist(), strict=True):
            # A budget in tokens stays fixed; a share grows with the text.
            self._budgets[layer] = own if self.method.budget <= 1 else float(max(round(own * self.prompt), 2))


def probes(queries: torch.Tensor, first: int, weighted: bool) -> torch.Tensor:
    """Compute the probes of a window's rows, each from the queries up to its own.

    Args:
        queries: [heads, m, head_dim] of the window.
        first: The first row that a probe is computed for.
        weighted: Weigh queries by their mean squared distance from the mean, in units of each channel's spread; False,
            and queries that do not differ, are weighed equally.

    Returns:
        [heads, m - first, head_dim].
    """
    m, dim = queries.shape[1:]
    counts = torch.arange(1, m + 1, dtype=queries.dtype, device=queries.device)[:, None]
    mean = (queries.cumsum(dim=1) / counts)[:, first:]
    if not weighted:
        return mean
    spread = (queries.square().cumsum(dim=1) / counts)[:, first:] - mean.square()
    # A channel in which all queries are equal adds no distance.
    scale = torch.where(spread > 1e-12, 1 / spread, 0.0)
    far = torch.einsum("hjc,hic->hij", queries.square(), scale)
    far = far - 2 * torch.einsum("hjc,hic->hij", queries, mean * scale) + (mean.square() * scale).sum(-1)[..., None]
    past = torch.ones(m, m, dtype=torch.bool, device=queries.device).tril()[first:]
    weights = (far / dim).clamp_min(0) * past
    total = weights.sum(dim=-1, keepdim=True)
    weights = torch.where(total > 1e-9, weights / total.clamp_min(1e-9), past / past.sum(dim=-1, keepdim=True))
    return weights @ queries


def entropy(scores: np.ndarray) -> float:
    """Of the softmax over [heads, n] scores, in nats, the mean over heads."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    weights /= weights.sum(axis=-1, keepdims=True)
    return float(-(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=-1).mean())
