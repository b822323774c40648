"""Models that a method's settings name."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeVar

from ..errors import SettingsError
from .protocol import LanguageModel, Reader

Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
"""What a model is loaded in; auto is its own precision."""

R = TypeVar("R", bound=Reader)


def named(model: R | str, dtype: Precision = "auto") -> R | LanguageModel:
    """The model itself, or the one that `decodery.load` knows by this name, in this precision.

    Raises SettingsError for the precision of a model that has it already.
    """
    if isinstance(model, str):
        return _load(model, dtype)
    if dtype != "auto":
        raise SettingsError(f"dtype={dtype} is for a second model given by name: name one, or leave dtype out")
    return model


@lru_cache(maxsize=4)
def _load(name: str, dtype: Precision) -> LanguageModel:
    from .load import load

    return load(name, dtype=dtype).model
