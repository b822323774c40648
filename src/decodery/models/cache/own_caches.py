"""A model of which nothing but the caches is another's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import torch

from decodery.core.abstract import Contract

from ..batch import Batch, Scores
from ..hooks import Tap
from ..layer_plan import WHOLE, LayerPlan
from ..over_model import OverModel
from ..protocol import Capabilities, LanguageModel, OpenModel, Reader
from ..torch.weights import Linear
from .cache import KVCache


class OwnCaches(OverModel, Contract):
    """A model whose texts remember in another way: after a learned past, or under a cache policy.

    It equals the model itself and all others over it, so that texts with one and texts without share passes.
    """

    model: LanguageModel

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    @abstractmethod
    def new_cache(self) -> KVCache:
        """See `Reader.new_cache`."""

    @property
    def bare(self) -> LanguageModel:
        """The model below all that only gives caches."""
        return cast(LanguageModel, bare(self.model))

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def capabilities(self) -> Capabilities:
        return self.model.capabilities

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    def embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.embed_tokens`."""
        return self._opened.embed_tokens(tokens)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.final_norm`."""
        return self._opened.final_norm(hidden)

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """See `OpenModel.project`."""
        return self._opened.project(normed)

    def projection(self, tokens: torch.Tensor | None) -> Linear:
        """See `OpenModel.projection`."""
        return self._opened.projection(tokens)

    def forward(self, batch: Batch, *, taps: Sequence[Tap] = (), layer_plan: LayerPlan = WHOLE) -> Scores:
        return self.model.forward(batch, taps=taps, layer_plan=layer_plan)

    @property
    def _opened(self) -> OpenModel:
        return cast(OpenModel, self.model)

    def __eq__(self, other: object) -> bool:
        return (other.bare if isinstance(other, OwnCaches) else other) is self.bare

    def __hash__(self) -> int:
        return hash(self.bare)


def bare(model: Reader) -> Reader:
    """The model itself, below all that only gives caches."""
    return bare(model.model) if isinstance(model, OwnCaches) else model
