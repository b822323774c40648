"""A cache whose content is given, and whose new rows keep their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from decodery.core.errors import SettingsError
from decodery.models.cache.attention_policy import AttentionPolicy
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import LanguageModel
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense


class TracedCache(KVCache):
    """Context of one pass: past [layers, 2, kv_heads, n, head_dim], its first slot at `first`.

    Rows are held aside and joined to it where they are attended to, so that gradients reach them, and the past where it
    is learned. It is read by one pass and never kept. Slots at negative positions belong to no token, as a prefix does.
    """

    def __init__(self, past: torch.Tensor, first: int = 0) -> None:
        layers, _, kv_heads, n, head_dim = past.shape
        super().__init__(layers, kv_heads, head_dim, dtype=past.dtype, device=past.device)
        self.past = past
        self.rows: dict[int, torch.Tensor] = {}
        self.lengths += n
        self.slot_positions.begin(np.arange(first, first + n, dtype=np.int32))
        self.next_position = first + n
        self.prefix = max(0, -first)

    def reserve(self, positions: np.ndarray, stays: int = 0, layers: Sequence[int] | None = None) -> None:
        self.slot_positions.begin(
            np.concatenate((self.slot_positions.of(0)[: self.length], positions.astype(np.int32)))
        )
        self.tentative = len(positions)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows[layer] = torch.stack((keys, values)).transpose(1, 2)

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows[layer]
        keys, values = torch.cat((self.past[layer].to(rows.dtype), rows), dim=2)
        return keys, values

    @classmethod
    def empty(cls, model: LanguageModel, policy: AttentionPolicy | None = None) -> TracedCache:
        """With no past, for texts that are read from their first token on in one pass."""
        config = model.config
        past = torch.zeros(
            config.num_layers, 2, config.num_kv_heads, 0, config.head_dim, dtype=model.dtype, device="cpu"
        )
        cache = cls(past.to(model.device))
        cache.policy = policy
        return cache


def differentiable(model: LanguageModel, what: str) -> Transformer:
    """The model, if gradients go through its passes.

    Raises SettingsError.
    """
    if not isinstance(model, Transformer) or not isinstance(model.weights.layers[0].qkv, Dense):
        raise SettingsError(f"{what} are trained over a model in floating point: load it with dtype='float32'")
    return model
