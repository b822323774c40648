"""A learned past: keys and values before a text in every layer, and the model whose texts begin after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile

from ..cache.cache import KVCache
from ..cache.own_caches import OwnCaches
from ..config import ModelConfig
from ..protocol import LanguageModel
from .artifact import Artifact, remembered

_KIND = "set of learned prefixes"


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
class Prefixes:
    """Prefixes by the name of what they steer to, learned together.

    Attributes:
        facts: How they were made, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where any model of their shape will do.
    """

    by_name: Mapping[str, KVPrefix]
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {name: prefix.data for name, prefix in self.by_name.items()}
        Artifact(_KIND, tensors, self.facts, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path) -> Prefixes:
        """Read what `save` wrote.

        Raises:
            ModelNotFound, CorruptFile: For anything else.
        """
        return _load(path)


@remembered
def _load(path: Path) -> Prefixes:
    read = Artifact.read(path, _KIND, "train some with `decodery train sven -m MODEL`")
    found = {name: KVPrefix(tensor) for name, tensor in read.tensors.items()}
    if not found or not all(each.data.is_floating_point() and each.data.ndim == 5 for each in found.values()):
        raise CorruptFile(f"{path} holds something else than learned prefixes")
    return Prefixes(found, read.facts, read.model)


class Prefixed(OwnCaches):
    """A model whose texts begin after a prefix. It equals the model itself, see `OwnCaches`."""

    def __init__(self, model: LanguageModel, prefix: KVPrefix) -> None:
        super().__init__(model)
        self.prefix = prefix

    def new_cache(self) -> KVCache:
        cache = self.model.new_cache()
        cache.prepend(self.prefix.data)
        return cache
