"""What a model reads in place of tokens that are not known yet: embeddings of their own, which no token has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from decodery.core.errors import VocabularyMismatch

from ..config import ModelConfig
from .artifact import Artifact, TrainedPart, expect


@dataclass(frozen=True, eq=False)
class Placeholders(TrainedPart):
    """Learned input embeddings.

    Attributes:
        data: [n, hidden] float32, row j for the (j + 1)-th token that is not known.
        facts: How they were made, as plain JSON; "vocabulary" names the tokenizer of the model they belong to, as in
            `ModelConfig`, and is empty where that does not matter.
        rates: [n, ranks] float32, how often each of the most likely tokens there was right in held-out texts; None
            where that was not counted.
    """

    KIND = "set of placeholders"
    MADE = "make some with decodery train lexical-units -m MODEL, or decodery train ppd -m MODEL"

    data: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    rates: torch.Tensor | None = None

    def check(self, config: ModelConfig) -> None:
        """Raise VocabularyMismatch where they were made for another model."""
        vocabulary = self.facts.get("vocabulary", "")
        if self.data.shape[1] != config.hidden_size or (vocabulary and vocabulary != config.vocabulary):
            raise VocabularyMismatch(f"these placeholders were made for another model: {self.MADE}, for this one")

    def artifact(self) -> Artifact:
        tensors = {"embeddings": self.data.detach().float()}
        if self.rates is not None:
            tensors["rates"] = self.rates.float()
        return Artifact(self.KIND, tensors, self.facts)

    @classmethod
    def from_artifact(cls, found: Artifact) -> Placeholders:
        data, rates = found.tensors["embeddings"], found.tensors.get("rates")
        expect(data.ndim == 2 and 0 not in data.shape and data.dtype == torch.float32)
        expect(rates is None or are_rates(rates, len(data)))
        return cls(data, found.facts, rates)


def are_rates(rates: torch.Tensor, ahead: int) -> bool:
    """Whether these are chances [ahead, ranks], falling along the ranks and none of them 0."""
    if rates.dtype != torch.float32 or rates.ndim != 2 or len(rates) != ahead or not rates.shape[1]:
        return False
    return bool((rates > 0).all() and (rates.sum(dim=1) <= 1.0 + 1e-5).all() and (rates.diff(dim=1) <= 0).all())
