"""A learned past: keys and values before a text in every layer, and the model whose texts begin after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cache.cache import KVCache
from ..cache.own_caches import OwnCaches
from ..config import ModelConfig
from ..protocol import LanguageModel
from .artifact import Artifact, TrainedPart, expect


@dataclass(frozen=True, eq=False)
class KVPrefix:
    """What a text's cache begins with.

    Keys are stored as attention uses them, after rotation. They stand at positions -n to -1, and the text begins at 0
    as it does without a prefix; rotary embeddings see differences only, so a text that begins at n, after keys turned n
    positions further, is the same.

    Attributes:
        data: [layers, 2 (keys, values), kv_heads, n, head_dim], any float dtype.
    """

    data: torch.Tensor

    @classmethod
    def zeros(cls, config: ModelConfig, n: int, dtype: torch.dtype = torch.float32) -> KVPrefix:
        """A prefix nothing was learned for. It still draws attention: every row spends some of it on zeros."""
        return cls(
            torch.zeros(config.num_layers, 2, config.num_kv_heads, n, config.head_dim, dtype=dtype, device="cpu")
        )

    def fits(self, config: ModelConfig) -> bool:
        """Whether it has the shape of a model's keys and values."""
        wanted = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        return self.data.ndim == 5 and (*self.data.shape[:3], self.data.shape[4]) == wanted and self.data.shape[3] > 0


@dataclass(frozen=True, eq=False)
class Prefixes(TrainedPart):
    """Prefixes by the name of what they steer to, learned together.

    Attributes:
        facts: How they were made, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where any model of their shape will do.
    """

    KIND = "set of learned prefixes"
    FILE = "prefixes.safetensors"
    MADE = "train some with `decodery train sven -m MODEL`"

    by_name: Mapping[str, KVPrefix]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def artifact(self) -> Artifact:
        tensors = {name: prefix.data for name, prefix in self.by_name.items()}
        return Artifact(self.KIND, tensors, self.facts, self.model)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Prefixes:
        tensors = found.tensors
        expect(bool(tensors) and all(each.is_floating_point() and each.ndim == 5 for each in tensors.values()))
        return cls({name: KVPrefix(each) for name, each in tensors.items()}, found.facts, found.model)


class Prefixed(OwnCaches):
    """A model whose texts begin after a prefix. It equals the model itself, see `OwnCaches`."""

    def __init__(self, model: LanguageModel, prefix: KVPrefix) -> None:
        super().__init__(model)
        self.prefix = prefix

    def new_cache(self) -> KVCache:
        cache = self.model.new_cache()
        cache.prepend(self.prefix.data)
        return cache
