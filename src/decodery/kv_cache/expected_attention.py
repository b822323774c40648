"""Expected Attention: tokens are scored by the attention that future queries are expected to pay them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.cache_policy import require_budget

from .after_prompt import Compressing, Prompt, angles


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

    def scores(self, seen: Prompt) -> np.ndarray:
        kv_heads, _, dim = seen.keys.shape
        mean, covariance = self.outlook(seen)
        # Sinks are always kept and receive most of the attention, so the softmax leaves them out.
        keys, values = (part[:, self.sinks :].double() for part in (seen.keys, seen.values))
        grouped = mean.reshape(kv_heads, -1, dim)
        spread = covariance.reshape(kv_heads, -1, dim, dim)
        products = torch.einsum("kgd,ksd->kgs", grouped, keys)
        products += torch.einsum("ksd,kgde,kse->kgs", keys, spread, keys) / 2
        paid = products.softmax(dim=-1).mean(dim=1)
        scores = ((paid + self.epsilon) * values.norm(dim=-1)).cpu().numpy()
        return np.concatenate((np.full((kv_heads, seen.keys.shape[1] - scores.shape[1]), np.inf), scores), axis=1)

    def outlook(self, seen: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [heads, head_dim] and covariance [heads, head_dim, head_dim] of the expected queries, scaled."""
        start = self.sinks if len(seen.at) > self.sinks + 1 else 0
        still = seen.turned(seen.queries.double(), -seen.at)[:, start:]
        mean = still.mean(dim=1)
        apart = still - mean[:, None]
        covariance = apart.transpose(1, 2) @ apart / still.shape[1]
        cos, sin = angles(seen.config, seen.layer, seen.keys.shape[1] + np.arange(self.future))
        along, across = (torch.diag(each.double().mean(dim=0)) for each in (cos, sin))
        turn = torch.cat((torch.cat((along, -across), dim=1), torch.cat((across, along), dim=1)))
        return mean @ turn.T, turn @ covariance @ turn.T
