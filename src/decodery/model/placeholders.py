"""What a model reads in place of tokens that are not known yet: embeddings of their own, which no token has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptFile, VocabularyMismatch
from .artifact import Artifact
from .config import ModelConfig

_KIND = "set of placeholders"
_MADE = "make some with decodery train units"


@dataclass(frozen=True, eq=False)
class Placeholders:
    """Learned input embeddings. data: [n, hidden] float32, row j for the (j + 1)-th token that is not known.

    facts: how they were made, as plain JSON; "vocabulary" names the tokenizer of the model they belong to, as in
    `ModelConfig`, and is empty where that does not matter.
    """

    data: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)

    def check(self, config: ModelConfig) -> None:
        """Raise VocabularyMismatch where they were made for another model."""
        vocabulary = self.facts.get("vocabulary", "")
        if self.data.shape[1] != config.hidden_size or (vocabulary and vocabulary != config.vocabulary):
            raise VocabularyMismatch(
                "these units were made for another model: make some for this one with decodery train units"
            )

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        Artifact(_KIND, {"embeddings": self.data.detach().float()}, self.facts).save(path)

    @classmethod
    def load(cls, path: Path) -> Placeholders:
        """Read what `save` wrote. Raises ModelNotFound where there is no such file, CorruptFile for anything else."""
        found = Artifact.read(path, _KIND, _MADE)
        data = found.tensors.get("embeddings")
        if data is None or data.ndim != 2 or 0 in data.shape or data.dtype != torch.float32:
            raise CorruptFile(f"{path} holds no {_KIND}, or is damaged: {_MADE}")
        return cls(data, found.facts)
