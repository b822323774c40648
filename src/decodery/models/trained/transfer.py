"""Maps that make the hidden state of a token into one of a token after it, as a draft of what is not written yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, SettingsError

from ..loaders.drafts import TRANSFER, given_or_shipped
from ..native.int8 import Int8Linear
from ..protocol import Reader
from .artifact import Artifact, refuse_other, remembered
from .placeholders import are_rates

_KIND = "hidden transfer"
_MADE = "make one with decodery train hidden-transfer -m MODEL"


@dataclass(frozen=True, eq=False)
class Transfer:
    """Map i predicts, after `layers`[i] layers, the state of the (i + 1)-th token after this one.

    Attributes:
        maps: [n, hidden, hidden] float32, to be multiplied from the left.
        layers: Ascending.
        rates: [n, ranks] float32, how often each of the most likely tokens there was right in held-out texts.
        facts: How they were made, as plain JSON.
        model: `fingerprint` of the model they belong to, "" where that does not matter.
    """

    maps: torch.Tensor
    layers: tuple[int, ...]
    rates: torch.Tensor
    facts: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""

    def rounded(self) -> Transfer:
        """With maps as a file keeps them: in int8, with a scale per output."""
        kept = [Int8Linear.quantize(each) for each in self.maps]
        maps = torch.stack([each.weight.float() * each.scale[:, None] for each in kept])
        return Transfer(maps, self.layers, self.rates, self.facts, self.model)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all; maps are kept in int8."""
        kept = [Int8Linear.quantize(each) for each in self.maps]
        tensors = {
            "weight": torch.stack([each.weight for each in kept]),
            "scale": torch.stack([each.scale for each in kept]),
            "layers": torch.tensor(self.layers, dtype=torch.int64, device="cpu"),
            "rates": self.rates.float(),
        }
        Artifact(_KIND, tensors, self.facts, self.model).save(path)

    @classmethod
    def load(cls, path: Path) -> Transfer:
        """Read what `save` wrote.

        Raises:
            ModelNotFound: If there is no such file.
            CorruptFile: For anything else.
        """
        found = Artifact.read(path, _KIND, _MADE)
        try:
            weight, scale, layers, rates = (found.tensors[name] for name in ("weight", "scale", "layers", "rates"))
            count, wide, _ = weight.shape
            ascending = (0, *layers.tolist()) == tuple(sorted((0, *layers.tolist())))
            if weight.dtype != torch.int8 or weight.shape != (count, wide, wide) or not are_rates(rates, count):
                raise ValueError
            if not count or not ascending or scale.dtype != torch.float32 or scale.shape != (count, wide):
                raise ValueError
            if layers.dtype != torch.int64 or layers.shape != (count,):
                raise ValueError
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptFile(f"{path} holds no {_KIND}, or is damaged: {_MADE}") from error
        maps = weight.float() * scale[:, :, None]
        return cls(maps, tuple(layers.tolist()), rates, found.facts, found.model)

    def check(self, model: Reader) -> None:
        """Raise SettingsError where it was made for another model."""
        advice = f"{_MADE}, for this one"
        refuse_other("this hidden transfer", self.model, model, advice)
        if self.maps.shape[1] != model.config.hidden_size or self.layers[-1] > model.config.num_layers:
            raise SettingsError(f"this hidden transfer was made for a model of another shape: {advice}")


def found_transfer(given: Transfer | str | None, model: Reader) -> Transfer:
    """What the setting `transfer` of a drafter names, or what comes along.

    Raises:
        SettingsError: If there is none, and whatever else is wrong with it.
    """
    if not isinstance(given, Transfer):
        path = given_or_shipped(given, TRANSFER, model.config.vocabulary)
        if path is None:
            raise SettingsError(
                "no hidden transfer for this model comes along: make one with `decodery train hidden-transfer -m "
                "MODEL --out DIR` and name it, as in hidden-transfer:transfer=DIR"
            )
        given = _load(path)
    given.check(model)
    return given


@remembered
def _load(path: Path) -> Transfer:
    return Transfer.load(path)
