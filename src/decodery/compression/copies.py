"""Copies that are made of a model while it is in use, each of them once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from decodery.core.errors import UnsupportedModel
from decodery.core.registry import resolve
from decodery.models.loaders.store import contents
from decodery.models.protocol import Reader
from decodery.models.torch.transformer import Transformer

from .base import transformed

_made: WeakKeyDictionary[Transformer, dict[str, tuple[object, Transformer]]] = WeakKeyDictionary()
_making = Lock()


def copy_of(model: Reader, spec: str) -> Transformer:
    """What the transformation `spec` makes of a model, which must read no text for that.

    Kept as long as the model. It is made anew where a file that `spec` names was replaced.
    """
    if not isinstance(model, Transformer):
        raise UnsupportedModel(
            "only decoders that this package runs itself can be transformed: this has an encoder, or is run by others"
        )
    with _making:
        copies, method = _made.setdefault(model, {}), resolve("compression", spec)
        now = _files(method)
        if spec not in copies or copies[spec][0] != now:
            copies[spec] = now, transformed(model, [method])[0]
        return copies[spec][1]


def _files(method: Any) -> list[object]:
    """What the files that a method's settings name hold."""
    paths = [
        Path(value).expanduser() for each in fields(method) if isinstance(value := getattr(method, each.name), str)
    ]
    return [contents(path) for path in paths if path.exists()]
