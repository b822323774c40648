"""Double Sparsity: a few channels of the keys decide which tokens are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.kernel_policy import Choice, SideStore
from decodery.models.config import ModelConfig
from decodery.models.protocol import LanguageModel
from decodery.models.trained.key_channels import KeyChannels
from decodery.step.cache_policy import best, require_budget

from .selecting import Asked, Selective, allowed, dots


@register(
    "double-sparsity",
    paper="Post-Training Sparse Attention with Double Sparsity (2024)",
    guarantee="lossy: rows read some tokens of the text; drafts give the text of plain decoding under it",
    requirements=("calibrated channels",),
)
@dataclass(frozen=True)
class DoubleSparsity(Selective):
    """Reads the tokens with the largest approximate scores, computed from the most important channels.

    No token is dropped. A group of query heads selects together, by the largest score of its heads, so that a key-value
    head is read once; the published code selects for every head separately. Class A. The native kernels store the
    approximate keys (labels) beside the cache, with one byte per channel and a range per token, and select without
    Python.

    Attributes:
        budget: See `CachePolicy`; by default the published 128 tokens.
        channels: Share of the channels of rotated keys that labels have, in the order of the calibration.
        calibration: `KeyChannels`, or the file or folder of `decodery train kv double-sparsity`.
        bits: Bits per channel of a label, between the smallest and the largest value of its token; 0 does not round.
        dense_layers: Number of first layers whose rows read all tokens.
        sinks: First tokens that are always read.
        recent: Last tokens that are always read; a row always reads its own token.
    """

    budget: float = 128
    channels: float = 0.25
    calibration: KeyChannels | str | None = None
    bits: int = 4
    dense_layers: int = 2
    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        require_budget("double-sparsity", self.budget)
        if not 0 < self.channels <= 1 or not 0 <= self.bits <= 8 or min(self.dense_layers, self.sinks, self.recent) < 0:
            raise SettingsError(
                "double-sparsity needs channels above 0 and up to 1, bits from 0 to 8, and no dense_layers, sinks or "
                "recent below 0"
            )

    def state(self, model: LanguageModel, prompt: int) -> AttentionPolicy:
        channels = KeyChannels.load(self.calibration, "double-sparsity:calibration")
        channels.require(model)
        # A calibration file is loaded once per text.
        return super(DoubleSparsity, replace(self, calibration=channels)).state(model, prompt)

    def dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    def choose(self, asked: Asked) -> np.ndarray:
        picked = torch.from_numpy(self.looked_at[asked.layer].astype(np.int64)).to(asked.keys.device)
        _, rows, group, _ = asked.queries.shape
        queries = asked.queries.gather(3, picked[:, None, None].expand(-1, rows, group, -1))
        labels = asked.keys.gather(2, picked[:, None].expand(-1, asked.keys.shape[1], -1))
        scores = dots(queries, rounded(labels, self.bits)).max(axis=2)
        last = asked.positions > (asked.at - self.recent)[:, None]
        own = np.arange(len(asked.positions)) == asked.own[:, None]
        forced = (asked.positions < self.sinks) | last | own
        scores = np.where(forced, np.inf, scores)
        return best(scores, asked.budgets(self.budget)[None], np.broadcast_to(asked.seen, scores.shape))

    def choice(self, config: ModelConfig, at: np.ndarray, store: SideStore | None) -> Choice | None:
        channels = self.looked_at
        if store is None:
            store = SideStore.of_labels(self.layers(config), config.num_kv_heads, channels.shape[2], self.bits)
        counts = allowed(self.budget, at)
        return Choice(counts, store, channels, self.bits, self.sinks, self.recent)

    @cached_property
    def looked_at(self) -> np.ndarray:
        """[layers, kv_heads, m] int32, the channels of the labels."""
        assert isinstance(self.calibration, KeyChannels)
        order = self.calibration.order
        picked = order[..., : math.ceil(self.channels * order.shape[-1])]
        return np.ascontiguousarray(picked.cpu().numpy(), dtype=np.int32)


def rounded(labels: torch.Tensor, bits: int) -> torch.Tensor:
    """Labels [..., channels] rounded to `bits` between minimum and maximum of a row, which stay exact."""
    if not bits:
        return labels
    low, high = labels.amin(dim=-1, keepdim=True), labels.amax(dim=-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    divisor = torch.where(step > 0, step, torch.ones_like(step))
    return low + step * ((labels - low) / divisor).round()
