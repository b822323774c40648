"""Models that a method's settings name."""

from __future__ import annotations

from functools import lru_cache

from .protocol import LanguageModel


def named(model: LanguageModel | str) -> LanguageModel:
    """The model itself, or the one that `decodery.load` knows by this name."""
    return _load(model) if isinstance(model, str) else model


@lru_cache(maxsize=4)
def _load(name: str) -> LanguageModel:
    from .load import load

    return load(name).model
