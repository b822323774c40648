"""Which channels of keys say most about attention, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import ModelConfig
from ..protocol import Reader
from .artifact import Artifact, refuse_other, remembered

CHANNELS = "key-channels.safetensors"
_KIND = "set of key channels"
_MADE = "make one with `decodery train kv double-sparsity -m MODEL FILES --out DIR`"


@dataclass(frozen=True, eq=False)
class KeyChannels:
    """By layer and head: the order of the channels of keys.

    Attributes:
        order: [layers, kv_heads, head_dim] channels of rotated keys, those that say most first.
        facts: How it was made.
        model: `fingerprint` of the model it belongs to, "" where any of its shape will do.
    """

    order: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def require(self, model: Reader) -> None:
        """Raise UnsupportedModel or SettingsError for a model that it was not made for."""
        config: ModelConfig = model.config
        if tuple(self.order.shape) != (config.num_layers, config.num_kv_heads, config.head_dim):
            raise UnsupportedModel(f"these key channels were made for a model of another shape: {_MADE}")
        refuse_other("this set of key channels", self.model, model, _MADE)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        Artifact(_KIND, {"order": self.order.to(torch.int32)}, self.facts, self.model).save(path)

    @classmethod
    def load(cls, path: str | Path) -> KeyChannels:
        """Read what `save` wrote, a file or the folder it is in. Raises ModelNotFound, or CorruptFile."""
        at = Path(path).expanduser()
        return _load(at / CHANNELS if at.is_dir() else at)


@remembered
def _load(path: Path) -> KeyChannels:
    read = Artifact.read(path, _KIND, _MADE)
    order = read.tensors.get("order")
    # Every head has each of its channels once.
    if (
        order is None
        or order.ndim != 3
        or not order.sort(dim=-1).values.equal(
            torch.arange(order.shape[-1], dtype=order.dtype, device="cpu").expand(order.shape)
        )
    ):
        raise CorruptFile(f"{path} holds something else than key channels: {_MADE}")
    return KeyChannels(order.long(), read.facts, read.model)
