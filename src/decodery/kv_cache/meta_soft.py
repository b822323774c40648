"""Meta-Soft: soft tokens, composed for the prompt, say what of it is kept; what is not flows into what is."""

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


@register(
    "meta-soft",
    paper=("Meta-Soft: Leveraging Composable Meta-Tokens for Context-Preserving KV Cache Compression (2026)"),
    guarantee="lossy: most of the prompt is gone for good; drafts give the text of plain decoding under it",
    requirements=("trained meta-tokens",),
)
@dataclass(frozen=True)
class MetaSoft(CachePolicy):
    """Keeps the prompt tokens that learned soft tokens attend to, and folds evicted ones in.

    Class B. The paper's abstract was read, not its code: every formula is a reading of it.

    Attributes:
        budget: See `CachePolicy`, of the prompt.
        trained: `MetaTokens`, or the file or folder of `decodery train kv meta-soft`. The soft tokens are read after
            the prompt in a pass of their own; their attention is averaged over them and over the heads of a group, and
            nothing of them is kept.
        sinks: First tokens that always stay.
        flow: How much of an evicted token's value goes over to kept ones, in proportion to what it was paid and to the
            attention between the two, for those `partners` between which and it there is most; 0 to drop alone.
        partners: Kept tokens that each evicted one is folded into.
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

    Args:
        asked: By layer, all queries of the prompt [heads, prompt, head_dim], until it is compressed.
    """

    def __init__(self, method: MetaSoft, meta: MetaTokens, config: ModelConfig, prompt: int) -> None:
        super().__init__(config, prompt, prompt if method.flow else 0)
        self.method, self.meta = method, meta
        self.asked: dict[int, torch.Tensor] = {}

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
                folded = values[head][stays] if seen is None else self._folded(seen, head, stays, paid[head].to(values))
                kept_values.append(folded.to(values.dtype))
            places = cache.positions[layer, : self.prompt]
            slots = np.nonzero(chosen)[1].reshape(len(chosen), -1)
            cache.refill(layer, torch.stack(kept_keys), torch.stack(kept_values), places[slots].max(axis=0))
        self.asked = {}

    def _folded(self, seen: Prompt, head: int, stays: torch.Tensor, paid: torch.Tensor) -> torch.Tensor:
        """[m, head_dim] the values of what stays in one head."""
        between = attention_between(seen, head)[~stays][:, stays]
        return folded(seen.values[head], paid, between, stays, self.method.flow, self.method.partners)


def attention_between(seen: Prompt, head: int) -> torch.Tensor:
    """[prompt, prompt] what the later of two tokens pays the earlier one, the mean over one group's heads."""
    group = seen.queries.shape[0] // len(seen.keys)
    queries, keys = seen.queries[head * group : (head + 1) * group], seen.keys[head]
    later = torch.ones(len(keys), len(keys), dtype=torch.bool, device=keys.device).triu(1)
    paid = torch.stack([(each @ keys.T).masked_fill(later, -torch.inf).softmax(dim=-1) for each in queries]).mean(dim=0)
    return paid + paid.tril(-1).T


def folded(
    values: torch.Tensor, paid: torch.Tensor, between: torch.Tensor, stays: torch.Tensor, flow: float, partners: int
) -> torch.Tensor:
    """[m, head_dim] of values [n, head_dim], those that stay, with what flows into them of the others.

    A token's share goes to the `partners` nearest to it: the sum of all values, each times what it counts, is what it
    was where flow is 1.

    Args:
        paid: [n] how much each token counts.
        between: [n - m, m] how near others and those that stay are.
        stays: [n] bool.
    """
    near = between.topk(min(partners, between.shape[1]), dim=1)
    shares = torch.zeros_like(between).scatter(1, near.indices, near.values)
    shares = flow * paid[~stays][:, None] * shares / shares.sum(dim=1, keepdim=True).clamp_min(1e-12)
    own = paid[stays][:, None]
    total = own + shares.sum(dim=0)[:, None]
    return torch.where(total > 0, (own * values[stays] + shares.T @ values[~stays]) / total, values[stays])
