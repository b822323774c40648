"""D2O: larger budgets for layers with flat attention, and evicted tokens merged into similar ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import normalize

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.cache.attention_policy import Attention, AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.step.cache_policy import entries, require_budget, shared_out

from .evicting import Evicting, Held, Scored, gathered, paid
from .merges import Merges
from .worths import Worths

_AT_ONCE = 1 << 20
"""Similarities that are computed at once."""


@register(
    "d2o",
    paper="D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models (2024)",
    guarantee="lossy: evicted tokens are merged or dropped; drafts give the text of plain decoding under it",
)
@dataclass(frozen=True)
class D2O(Scored):
    """Keeps heavy hitters and a window in budgets by layer, and merges evicted tokens into similar ones.

    A merged entry keeps its target's position. Class D. What a layer's bounds cut from its budget goes to the other
    layers.

    Attributes:
        budget: See `CachePolicy`, the mean over the compressed layers. Layers with even attention get more: softmax
            over layers of minus the variance of the attention that the prompt's tokens received, scaled to 0-1 over
            heads.
        recent: Share of a layer's budget for the window of recent tokens.
        sinks: First tokens that are always kept.
        dense: Number of first layers that keep all tokens; the last layer always does so too.
        beta: Weight of the newest step in the running mean of similarities.
        threshold: Whether an evicted token is merged only if the cosine similarity of its key to a kept one reaches the
            running mean of evicted tokens.
        merge: "softmax" weighs a token by the exponential of its similarity, and its target by e. "mean" takes the mean
            of the target and the tokens times their similarity, as the published code does. "none" drops evicted
            tokens.
    """

    kernels = True

    budget: float = 0.2
    recent: float = 0.5
    sinks: int = 4
    dense: int = 2
    beta: float = 0.7
    threshold: bool = True
    merge: Literal["softmax", "mean", "none"] = "softmax"

    def __post_init__(self) -> None:
        require_budget("d2o", self.budget)
        if not 0 <= self.recent <= 1 or not 0 <= self.beta <= 1 or self.sinks < 0 or self.dense < 0:
            raise SettingsError("d2o needs recent and beta between 0 and 1, sinks >= 0 and dense >= 0")
        if self.merge not in ("softmax", "mean", "none"):
            raise SettingsError(f"d2o: merge must be softmax, mean or none, not {self.merge!r}")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        kind = Evicting if self.merge == "none" else Merging
        return kind(self, model.config, prompt, by_kernel=model.capabilities.cache_kernels)

    def most(self, length: int) -> int:
        # Which layer gets how much is known after the prompt.
        return length

    def protected(self, count: int) -> tuple[int, int]:
        # Sinks are the first slots of every head, because they are never evicted.
        return self.sinks, round(self.recent * count)

    def budgets(self, scores: dict[int, np.ndarray], layers: int) -> dict[int, float]:
        shared = [layer for layer in scores if self.dense <= layer < layers - 1]
        found = dict.fromkeys(scores, 1.0)
        if not shared:
            return found
        length = scores[shared[0]].shape[1]
        spread = np.array([_spread(scores[layer]) for layer in shared])
        weights = np.exp(-spread) / np.exp(-spread).sum()
        shares = shared_out(weights, entries(self.budget, length) / length)
        for layer, share in zip(shared, shares.tolist(), strict=True):
            # A budget in tokens stays fixed; a share grows with the text.
            found[layer] = share if self.budget <= 1 else float(max(round(share * length), 2))
        return found

    def folded(
        self, keys: torch.Tensor, values: torch.Tensor, chosen: np.ndarray, tau: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Merge evicted keys and values into kept ones.

        Args:
            keys: [kv_heads, m, head_dim].
            values: [kv_heads, m, head_dim].
            chosen: [kv_heads, m] bool, the kept slots.
            tau: [kv_heads] threshold of similarity, None for the first merge.

        Returns:
            The kept keys and values, and the new threshold.
        """
        found: list[float] = []
        kept_keys: list[torch.Tensor] = []
        kept_values: list[torch.Tensor] = []
        for head, stays in enumerate(torch.from_numpy(chosen).to(keys.device)):
            here, gone = keys[head].double(), ~stays
            near, target = _nearest(here[gone], here[stays])
            mean = float(near.mean())
            limit = mean if tau is None else self.beta * mean + (1 - self.beta) * float(tau[head])
            found.append(limit)
            joins = near >= limit if self.threshold else torch.ones_like(near, dtype=torch.bool)
            near, target = near[joins], target[joins]
            for part, out in ((here, kept_keys), (values[head].double(), kept_values)):
                out.append(self._joined(part[stays], part[gone][joins], near, target).to(keys.dtype))
        return torch.stack(kept_keys), torch.stack(kept_values), np.array(found)

    def _joined(self, kept: torch.Tensor, gone: torch.Tensor, near: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        own = torch.full((len(kept), 1), np.e if self.merge == "softmax" else 1.0, dtype=kept.dtype, device=kept.device)
        weight = near.exp() if self.merge == "softmax" else torch.ones_like(near)
        brought = gone if self.merge == "softmax" else gone * near[:, None]
        total = own.index_add(0, target, weight[:, None])
        summed = (own * kept).index_add(0, target, weight[:, None] * brought) / total
        # Entries without a merged token keep their bits.
        return torch.where(total > own, summed, kept)


def _nearest(gone: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest cosine of each row [n, head_dim] with a kept one, and that row's number."""
    kept = normalize(kept, dim=-1).T
    # Never all similarities of a long prompt at once.
    blocks = normalize(gone, dim=-1).split(max(_AT_ONCE // kept.shape[1], 1))
    near, target = zip(*((block @ kept).max(dim=1) for block in blocks), strict=True)
    return torch.cat(near), torch.cat(target)


def _spread(scores: np.ndarray) -> float:
    """Variance of the attention that tokens received [kv_heads, prompt], scaled to 0-1 within the layer's heads."""
    variance = scores.var(axis=1)
    low, high = variance.min(), variance.max()
    return float(((variance - low) / (high - low)).mean()) if high > low else 0.0


@dataclass(frozen=True, eq=False)
class Folded(Held):
    """Kept entries of a layer with merged keys and values.

    Attributes:
        keys: [kv_heads, m, head_dim], None where they equal those of the cache.
        values: [kv_heads, m, head_dim], None where they equal those of the cache.
        tau: The threshold of merging.
        merged: Whether a token was merged so far.
    """

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    tau: np.ndarray | None = None
    merged: bool = False

    @property
    def beside(self) -> int:
        return sum(each.nbytes for each in (self.keys, self.values) if each is not None)


class Merging(Evicting):
    """State of a policy that evicts tokens and changes kept keys and values.

    Where a row merges, the attention of later rows in the same pass is computed here.
    """

    method: D2O

    def __init__(self, method: D2O, config: ModelConfig, prompt: int, *, by_kernel: bool) -> None:
        super().__init__(method, config, prompt, by_kernel=by_kernel)
        self._contexts: dict[int, dict[int, torch.Tensor]] = {}

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return self.settled

    def _merges(self) -> Merges:
        known = np.full((self.config.num_layers, self.config.num_kv_heads), np.nan)
        for layer, held in self._held.items():
            if isinstance(held, Folded) and held.tau is not None:
                known[layer] = held.tau
        return Merges(known, self.method.beta, self.method.threshold, self.method.merge == "softmax")

    def _after_prompt(self, cache: KVCache, evicting: int, slots: int, rows: int) -> int:
        known, kv_heads = super()._after_prompt(cache, evicting, slots, rows), self.config.num_kv_heads
        row = cache.pages.pool.row * cache.pages.pool.dtype.itemsize
        if self.kernels:
            return known + Merges.most_bytes(self.config.num_layers, evicting, kv_heads, row, rows)
        number = torch.float32.itemsize if cache.coded else cache.pages.pool.dtype.itemsize
        return known + 2 * (evicting * rows + 1) * kv_heads * (slots - rows + 1) * self.config.head_dim * number

    def _alike(self, worths: Worths, lengths: np.ndarray) -> dict[int, Held]:
        assert worths.merges is not None
        found: dict[int, Held] = {}
        for layer, held in super()._alike(worths, lengths).items():
            assert isinstance(held, Folded)
            tau = worths.merges.known[layer]
            merged = not bool(np.isnan(tau).any())
            found[layer] = replace(held, tau=tau if merged else None, merged=merged)
        return found

    def select(self, attention: Attention) -> np.ndarray | None:
        self._contexts[attention.layer] = {}
        return super().select(attention)

    def merge(self, attention: Attention) -> torch.Tensor:
        assert attention.context is not None
        context = attention.context.clone()
        for row, found in self._contexts.pop(attention.layer, {}).items():
            context[row] = found.to(context)
        return context

    def _after(self, attention: Attention, row: int, held: Held) -> Held:
        assert isinstance(held, Folded)
        keys, values = (self._with_own(held, name, attention) for name in ("keys", "values"))
        weights = paid(attention.queries[row], keys)
        if held.merged:
            shares = torch.from_numpy(weights).to(values.device)
            found = torch.einsum("kgm,kmd->kgd", shares, values.double())
            self._contexts[attention.layer][row] = found.reshape(attention.queries[row].shape)
        held = replace(held, scores=self.method.written(held.scores, weights), keys=None, values=None)
        if len(held.slots[0]) and self._moved(held, keys, attention):
            held = replace(held, keys=keys, values=values)
        left = self._left(held, attention.layer, int(attention.segment.positions[row]) + 1, keys, values)
        assert isinstance(left, Folded) and attention.segment.cache is not None
        if left.keys is None or left.values is None:
            return left
        # Rounded as in the cache, so that the next row of the pass reads the same values as it would from there.
        cache = attention.segment.cache
        return replace(left, keys=cache.rounded(left.keys), values=cache.rounded(left.values))

    def _with_own(self, held: Folded, name: str, attention: Attention) -> torch.Tensor:
        """[kv_heads, m, head_dim] the keys or values that a row reads, its own slot last."""
        known, part = getattr(held, name), getattr(attention, name)
        if known is None:
            return gathered(part, held.slots)
        return torch.cat((known, gathered(part, held.slots[:, -1:])), dim=1)

    def _moved(self, held: Folded, keys: torch.Tensor, attention: Attention) -> bool:
        """Whether the kept keys differ from those in the cache."""
        return held.merged and not keys.equal(gathered(attention.keys, held.slots))

    def _left(self, held: Held, layer: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> Held:
        if not isinstance(held, Folded):
            held = Folded(held.slots, held.scores)
        count = entries(self._budgets[layer], length)
        if count >= held.scores.shape[1]:
            return held
        chosen = self.method.chosen(held.scores, count)
        kept_keys, kept_values, tau = self.method.folded(keys, values, chosen, held.tau)
        left = held.picked(chosen)
        assert isinstance(left, Folded)
        return replace(left, keys=kept_keys, values=kept_values, tau=tau, merged=True)

    def _keep(self, cache: KVCache, layer: int, held: Held) -> None:
        assert isinstance(held, Folded)
        if held.keys is not None and held.values is not None:
            places = cache.positions[layer][held.slots].max(axis=0)
            cache.refill(layer, held.keys, held.values, places)
        else:
            super()._keep(cache, layer, held)
        content = Held.content(held.scores)
        self._held[layer] = Folded(content.slots, content.scores, tau=held.tau, merged=held.merged)

    def cut(self, cache: KVCache) -> None:
        super().cut(cache)
        self._contexts = {}
