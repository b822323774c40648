"""Models of `transformers` that are in memory already, as language models. Imports transformers where it is used."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..protocol import LanguageModel

_ATTRIBUTE = "_decodery_model"


class Held:
    """What a model of `transformers` keeps in an attribute, so that both go together.

    A copy of the model begins anew.

    Args:
        value: What it keeps.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()


def is_live(model: Any) -> bool:
    """Whether this is a model of `transformers`."""
    if not isinstance(model, torch.nn.Module) or (library := sys.modules.get("transformers")) is None:
        return False
    return isinstance(model, library.PreTrainedModel)


def language_model(model: Any) -> LanguageModel:
    """A model of `transformers` as a language model; the same object until it is moved or cast.

    Args:
        model: The model.

    Returns:
        The language model, in the same weights.

    Raises:
        UnsupportedModel: As `decodery.load` of the same weights through an adapter.
    """
    held = model.__dict__.get(_ATTRIBUTE)
    known = None if held is None else held.value
    if known is None or (known.device, known.dtype) != (model.device, model.dtype):
        from .adapter import TransformersModel

        training = model.training
        known = TransformersModel(model)
        model.__dict__[_ATTRIBUTE] = Held(known)
        model.train(training)
    found: LanguageModel = known
    return found
