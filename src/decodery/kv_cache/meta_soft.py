"""Meta-Soft: soft tokens, composed for the prompt, select what is kept; evicted tokens are merged into kept ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Requirements
from decodery.models.batch import Segment
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel, takes_states
from decodery.models.trained.meta_tokens import MetaTokens
from decodery.step.cache_policy import CachePolicy, best, entries, require_budget
from decodery.step.forward_request import ForwardCoroutine
from decodery.step.sequence import Sequence

from .after_prompt import Prompt
from .probing import Probing, probed
from .selecting import precise

_AT_ONCE = 1 << 20
"""Weights that are computed at once."""


@register(
    "meta-soft",
    paper=("Meta-Soft: Leveraging Composable Meta-Tokens for Context-Preserving KV Cache Compression (2026)"),
    guarantee="lossy: most of the prompt is dropped; drafts give the text of plain decoding under it",
    requirements=("trained meta-tokens",),
)
@dataclass(frozen=True)
class MetaSoft(CachePolicy):
    """Keeps the prompt tokens that learned soft tokens attend to, and merges evicted values into them.

    Class B. Only the paper's abstract was available: all formulas are our reading of it.

    Attributes:
        budget: See `CachePolicy`, of the prompt.
        trained: `MetaTokens`, or the file or folder of `decodery train kv meta-soft`. An extra pass reads the soft
            tokens after the prompt. Their attention is averaged over them and over the heads of a group; then they are
            dropped.
        sinks: First tokens that are always kept.
        flow: Share of an evicted token's value that is added to the values of kept tokens, weighted by the attention
            that it received and by the attention between both tokens; 0 only drops it.
        partners: Number of kept tokens that each evicted one is merged into, those with the most attention between.
    """

    requirements = Requirements(keys=True, policies=True, states=True)

    budget: float = 1024
    trained: MetaTokens | str | None = None
    sinks: int = 4
    flow: float = 1.0
    partners: int = 4

    def __post_init__(self) -> None:
        require_budget("meta-soft", self.budget)
        if self.sinks < 0 or not 0 <= self.flow < math.inf or self.partners < 1:
            raise SettingsError("meta-soft needs sinks and a finite flow of at least 0 and partners of at least 1")

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        meta = MetaTokens.load(self.trained, "meta-soft:trained")
        meta.require(model)
        return Flowing(replace(self, trained=meta), meta, model.config, prompt)

    def settle(self, seq: Sequence) -> ForwardCoroutine[None]:
        state, model, prompt = seq.cache.policy, seq.request.model, seq.tokens[: seq.request.prompt_length]
        assert isinstance(state, Flowing) and takes_states(model)
        soft = state.meta.compose(model.embed_tokens(torch.tensor(prompt, dtype=torch.int64, device=model.device)))
        soft = soft[: model.config.max_positions - len(prompt)]
        positions = np.arange(len(prompt), len(prompt) + len(soft))
        yield from probed(seq, Segment(positions, None, soft, cache=seq.cache, logit_rows=[]))


class Flowing(Probing):
    """State of the policy: the prompt's queries until it is compressed.

    Attributes:
        asked: By layer, all queries [heads, prompt, head_dim] of the prompt, until it is compressed.
    """

    def __init__(self, method: MetaSoft, meta: MetaTokens, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt, prompt if method.flow else 0)
        self.method, self.meta = method, meta
        self.asked: dict[int, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        return super().bytes + sum(queries.nbytes for queries in self.asked.values())

    def _settle(self, cache: KVCache) -> None:
        self.asked = {layer: torch.cat(parts).transpose(0, 1) for layer, parts in self._queries.items()}

    def compress(self, cache: KVCache) -> None:
        count = entries(self.method.budget, self.prompt)
        for layer, paid in self.paid.items() if count < self.prompt else ():
            scores = paid.double().cpu().numpy().copy()
            scores[:, : self.method.sinks] = np.inf
            chosen = best(scores, count)
            keys, values = cache.view(layer)
            asked = precise(self.asked[layer]) if self.method.flow else None
            seen = None
            if asked is not None:
                seen = Prompt(self.config, layer, asked, np.arange(self.prompt), precise(keys), precise(values))
            kept_keys, kept_values = [], []
            for head, stays in enumerate(torch.from_numpy(chosen).to(keys.device)):
                kept_keys.append(keys[head][stays])
                folded = values[head][stays] if seen is None else self._folded(seen, head, stays, paid[head])
                kept_values.append(folded.to(values.dtype))
            places = cache.positions[layer, : self.prompt]
            slots = np.nonzero(chosen)[1].reshape(len(chosen), -1)
            cache.refill(layer, torch.stack(kept_keys), torch.stack(kept_values), places[slots].max(axis=0))
        self.asked = {}

    def _folded(self, seen: Prompt, head: int, stays: torch.Tensor, paid: torch.Tensor) -> torch.Tensor:
        """[m, head_dim] the values of one head's kept tokens, with evicted values merged in."""
        near, partners = nearest(seen, head, stays, self.method.partners)
        return folded(seen.values[head], paid.to(seen.values), near, partners, stays, self.method.flow)


def nearest(seen: Prompt, head: int, stays: torch.Tensor, partners: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept tokens with the most attention between them and each evicted one.

    That is the attention from the later to the earlier of two tokens, the mean over a group.

    Args:
        seen: The prompt.
        head: A key-value head.
        stays: [n] bool, true for the m kept tokens.
        partners: How many kept tokens to find.

    Returns:
        The attention, and the numbers of these kept tokens, [n - m, partners].
    """
    group = seen.queries.shape[0] // len(seen.keys)
    queries, keys = seen.queries[head * group : (head + 1) * group], seen.keys[head]
    every = torch.arange(len(keys), device=keys.device)
    kept, asked = every[stays], queries[:, stays]
    # In blocks of rows: never the attention of all tokens to all others.
    sums = [
        (queries[:, rows] @ keys.T).masked_fill(every > rows[:, None], -torch.inf).logsumexp(dim=-1)
        for rows in every.split(max(_AT_ONCE // (group * len(keys)), 1))
    ]
    total = torch.cat(sums, dim=1)
    found = []
    for rows in every[~stays].split(max(_AT_ONCE // (group * len(kept)), 1)):
        forth = queries[:, rows] @ keys[kept].T - total[:, rows, None]
        back = (asked @ keys[rows].T).mT - total[:, None, kept]
        between = torch.where(rows[:, None] > kept, forth, back).exp().mean(dim=0)
        found.append(between.topk(min(partners, len(kept)), dim=1))
    return torch.cat([each.values for each in found]), torch.cat([each.indices for each in found])


def folded(
    values: torch.Tensor,
    paid: torch.Tensor,
    near: torch.Tensor,
    partners: torch.Tensor,
    stays: torch.Tensor,
    flow: float,
) -> torch.Tensor:
    """Merge the values of evicted tokens into those of kept ones.

    With flow=1 this preserves the sum of all values, each multiplied by its weight.

    Args:
        values: [n, head_dim].
        paid: [n] weight of each token, the attention that it received.
        near: [n - m, partners] proximity of each evicted token and those that it goes to.
        partners: [n - m, partners] their numbers among the kept ones.
        stays: [n] bool, true for the m kept tokens.
        flow: Share of an evicted token's weight that goes to others.

    Returns:
        [m, head_dim] values of the kept tokens.
    """
    shares = flow * paid[~stays][:, None] * near / near.sum(dim=1, keepdim=True).clamp_min(1e-12)
    own, flat = paid[stays][:, None], partners.flatten()
    total = own.index_add(0, flat, shares.flatten()[:, None])
    brought = (shares[..., None] * values[~stays][:, None]).flatten(0, 1)
    summed = (own * values[stays]).index_add(0, flat, brought)
    return torch.where(total > 0, summed / total, values[stays])
