"""What a model reads in place of tokens that are not known yet: embeddings of their own, which no token has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CorruptFile, ModelNotFound, VocabularyMismatch
from .config import ModelConfig
from .store import replacing

FORMAT = "decodery units 1"
_MOST_BYTES = 1 << 26


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
        from safetensors.torch import save_file

        with replacing(path) as temporary:
            save_file(
                {"embeddings": self.data.detach().float().contiguous()},
                temporary,
                metadata={"format": FORMAT, "facts": json.dumps(dict(self.facts))},
            )

    @classmethod
    def load(cls, path: Path) -> Placeholders:
        """Read what `save` wrote. Raises ModelNotFound where there is no such file, CorruptFile for anything else."""
        from safetensors import SafetensorError, safe_open

        wrong = f"{path} holds no units, or is damaged: make some with decodery train units"
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ModelNotFound(
                f"there are no units at {path}: make some with decodery train units, or correct the path"
            ) from error
        if size > _MOST_BYTES:
            raise CorruptFile(wrong)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise CorruptFile(wrong)
                facts, data = json.loads(metadata["facts"]), file.get_tensor("embeddings")
        except (OSError, KeyError, ValueError, RecursionError, SafetensorError) as error:
            raise CorruptFile(wrong) from error
        sound = isinstance(facts, dict) and data.ndim == 2 and 0 not in data.shape and data.dtype == torch.float32
        if not sound or not bool(torch.isfinite(data).all()):
            raise CorruptFile(wrong)
        return cls(data, facts)
