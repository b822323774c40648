"""Heads of one layer that go on from guesses of the target's last states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from decodery.models.hooks import Tap
from decodery.models.torch.transformer import Transformer

from .copied import copied_layer
from .head import Guess, TrainedHead
from .matching import LAST, disturbed, features_of, mismatch
from .recurrent import RecurrentHead


class FeatureHead(RecurrentHead):
    """Features are the target's states after its final norm.

    One layer without a norm before it guesses the next one. It learns one step at a time, under noise.

    Attributes:
        matched: What the distance of the features weighs in training beside that of the words.
    """

    taught = 1
    matched: ClassVar[float]

    @classmethod
    def reads(cls, trained: TrainedHead) -> tuple[Tap, ...]:
        return (LAST,)

    @classmethod
    def untrained(cls, model: Transformer, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        # The layer was made for another stream: what it adds to this one is learned from nothing.
        shape, tensors = copied_layer(model, model.config.num_layers - 1, silent=True)
        like, hidden = tensors["layer.qkv.weight"], model.config.hidden_size
        random = torch.Generator().manual_seed(seed)
        return tensors | cls.fresh(hidden, shape.inner, like, random), {"layer": asdict(shape)}

    @classmethod
    @abstractmethod
    def fresh(cls, hidden: int, inner: int, like: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
        """Its own tensors beside the layer's, of the kind of `like`: a feature is passed on as it is."""

    @abstractmethod
    def chosen(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Features and embeddings of the tokens that followed [n, hidden] -> the layer's input [n, hidden]."""

    def enter(self, states: dict[Tap, torch.Tensor]) -> torch.Tensor:
        return features_of(self.model, states, self.dtype)

    def inputs(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self.chosen(features, embedded)
        return stream, stream

    def leave(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return stream, stream

    def given(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return disturbed(features, tokens) if self.learns else features

    def regret(self, guesses: list[Guess], states: dict[Tap, torch.Tensor], known: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.enter({LAST: states[LAST].flatten(0, 1)}).view(*known.shape, -1)
        return self.matched * mismatch(guesses, features, known)
