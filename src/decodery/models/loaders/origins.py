"""Where the models of this process were loaded from."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from ..protocol import LanguageModel, Reader

_origins: WeakKeyDictionary[LanguageModel, str] = WeakKeyDictionary()


def loaded_from(model: LanguageModel, origin: str) -> None:
    """Remember the folder, file, Hub id or name that a model was loaded from.

    Args:
        model: The model.
        origin: Where it came from, "" where that is not known.
    """
    if origin:
        _origins[model] = origin


def origin_of(model: Reader) -> str:
    """Where a model was loaded from, "" where that is not known."""
    return next((origin for each, origin in list(_origins.items()) if each is model), "")
