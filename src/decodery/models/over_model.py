"""What a model over another one has of it."""

from __future__ import annotations

import torch

from .cache.cache import KVCache
from .config import ModelConfig
from .protocol import Reader


class OverModel:
    """A base of what reads texts by another model: its sizes, its device, its precision and its caches.

    Attributes:
        model: The other model.
    """

    model: Reader

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def new_cache(self) -> KVCache:
        """A cache of the other model."""
        return self.model.new_cache()
