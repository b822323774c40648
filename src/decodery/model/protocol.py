"""What the decoding loop asks of a language model, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from .batch import Batch, Scores
from .cache import KVCache
from .config import ModelConfig


class Reader(Protocol):
    """What a text can be read by: a model, or what is made of several."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    def new_cache(self) -> KVCache: ...


@runtime_checkable
class LanguageModel(Reader, Protocol):
    """Anything that scores rows of tokens against a cache."""

    def forward(self, batch: Batch, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None) -> Scores:
        """Run the rows of `batch` once; each segment's cache then holds them as scratch.

        taps: after how many layers hidden states are returned, counted from either end, see `tapped_layers`. layers:
        which layers to run, None for all.
        """
        ...
