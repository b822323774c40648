"""Where the models of this process were loaded from."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

from ..protocol import LanguageModel, Reader
from .package_index import EMBEDDED, gguf_path

_origins: WeakKeyDictionary[LanguageModel, str] = WeakKeyDictionary()
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_CODED = re.compile(r"([-_.](ud|i1))?[-_.](i?q\d\w*|tq\d\w*|mxfp4\w*|bf16|fp?16|fp?32)$")
"""How names of GGUF files end: the part of several, and the code of the weights."""


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


def same_model(one: str, other: str) -> bool:
    """Whether two places are called after one model.

    Args:
        one, other: Hub ids, folders, snapshots of the Hub's cache or GGUF files.
    """
    return bool(_called(one)) and _called(one) == _called(other)


def _called(place: str) -> str:
    """The model's name in a place, without its owner, its code and its files' ending."""
    for name, model in EMBEDDED.items():
        if place == name or place.endswith(f"/{gguf_path(name).name}"):
            # As its authors call it.
            place = model.member
    parts = place.lower().replace("\\", "/").rstrip("/").split("/")
    if parts[-1].endswith(".gguf"):
        return _CODED.sub("", _PART.sub("", parts[-1].removesuffix(".gguf")))
    cached = [part for part in parts if part.startswith("models--")]
    named = cached[-1].rpartition("--")[2] if cached else parts[-1].partition(":")[0]
    return named.removesuffix("-gguf")
