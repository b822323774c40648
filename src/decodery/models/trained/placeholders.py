"""What a model reads in place of tokens that are not known yet: embeddings of their own, which no token has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, SettingsError, VocabularyMismatch

from ..config import ModelConfig
from ..loaders.drafts import given_or_shipped
from ..protocol import Reader
from .artifact import Artifact, remembered

_KIND = "set of placeholders"
_MADE = "make some with decodery train lexical-units -m MODEL, or decodery train ppd -m MODEL"


@dataclass(frozen=True, eq=False)
class Placeholders:
    """Learned input embeddings.

    Attributes:
        data: [n, hidden] float32, row j for the (j + 1)-th token that is not known.
        facts: How they were made, as plain JSON; "vocabulary" names the tokenizer of the model they belong to, as in
            `ModelConfig`, and is empty where that does not matter.
        rates: [n, ranks] float32, how often each of the most likely tokens there was right in held-out texts; None
            where that was not counted.
    """

    data: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    rates: torch.Tensor | None = None

    def check(self, config: ModelConfig) -> None:
        """Raise VocabularyMismatch where they were made for another model."""
        vocabulary = self.facts.get("vocabulary", "")
        if self.data.shape[1] != config.hidden_size or (vocabulary and vocabulary != config.vocabulary):
            raise VocabularyMismatch(f"these placeholders were made for another model: {_MADE}, for this one")

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {"embeddings": self.data.detach().float()}
        if self.rates is not None:
            tensors["rates"] = self.rates.float()
        Artifact(_KIND, tensors, self.facts).save(path)

    @classmethod
    def load(cls, path: Path) -> Placeholders:
        """Read what `save` wrote.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: For anything else.
        """
        found = Artifact.read(path, _KIND, _MADE)
        data, rates = found.tensors.get("embeddings"), found.tensors.get("rates")
        if data is None or data.ndim != 2 or 0 in data.shape or data.dtype != torch.float32:
            raise CorruptFile(f"{path} holds no {_KIND}, or is damaged: {_MADE}")
        if rates is not None and not are_rates(rates, len(data)):
            raise CorruptFile(f"{path} holds no rates of its placeholders, or is damaged: {_MADE}")
        return cls(data, found.facts, rates)


def are_rates(rates: torch.Tensor, ahead: int) -> bool:
    """Whether these are chances [ahead, ranks], falling along the ranks and none of them 0."""
    if rates.dtype != torch.float32 or rates.ndim != 2 or len(rates) != ahead or not rates.shape[1]:
        return False
    return bool((rates > 0).all() and (rates.sum(dim=1) <= 1.0 + 1e-5).all() and (rates.diff(dim=1) <= 0).all())


def found_placeholders(
    given: Placeholders | str | None, file: str, model: Reader, *, drafter: str, setting: str, command: str
) -> Placeholders:
    """The placeholders that a setting of a drafter names, or the shipped ones.

    Args:
        given: The placeholders, their file or folder; None for the shipped ones.
        file: The name of their file.
        model: The model that reads them.
        drafter: The name of the drafter.
        setting: The name of its setting.
        command: The command of `decodery train` that makes them.

    Raises:
        SettingsError: There are none for this model, or they do not fit it.
    """
    if not isinstance(given, Placeholders):
        path = given_or_shipped(given, file, model.config.vocabulary)
        if path is None:
            raise SettingsError(
                f"no {setting} are shipped for this model: train some with `decodery train {command} -m MODEL "
                f"--out DIR` and name them, as in {drafter}:{setting}=DIR"
            )
        given = _load(path)
    given.check(model.config)
    return given


@remembered
def _load(path: Path) -> Placeholders:
    return Placeholders.load(path)
