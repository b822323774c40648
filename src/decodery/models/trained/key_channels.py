"""Which channels of keys say most about attention, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from decodery.core.errors import UnsupportedModel

from ..config import ModelConfig
from ..protocol import Reader
from .artifact import Artifact, TrainedPart, expect


@dataclass(frozen=True, eq=False)
class KeyChannels(TrainedPart):
    """By layer and head: the order of the channels of keys.

    Attributes:
        order: [layers, kv_heads, head_dim] channels of rotated keys, those that say most first.
        facts: How it was made.
        model: `fingerprint` of the model it belongs to, "" where any of its shape will do.
    """

    KIND = "set of key channels"
    FILE = "key-channels.safetensors"
    MADE = "make one with `decodery train kv double-sparsity -m MODEL FILES --out DIR`"

    order: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def require(self, model: Reader) -> None:
        """Raise UnsupportedModel or SettingsError for a model that it was not made for."""
        config: ModelConfig = model.config
        if tuple(self.order.shape) != (config.num_layers, config.num_kv_heads, config.head_dim):
            raise UnsupportedModel(f"these key channels were made for a model of another shape: {self.MADE}")
        self.refuse_other(model)

    def artifact(self) -> Artifact:
        return Artifact(self.KIND, {"order": self.order.to(torch.int32)}, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> KeyChannels:
        order = found.tensors["order"]
        # Every head has each of its channels once.
        each = torch.arange(order.shape[-1], dtype=order.dtype, device="cpu")
        expect(order.ndim == 3 and order.sort(dim=-1).values.equal(each.expand(order.shape)))
        return cls(order.long(), found.facts, found.model)
