"""Copies that are made of a model while it is in use, each of them once."""

from __future__ import annotations

from threading import Lock
from weakref import WeakKeyDictionary

from ..errors import UnsupportedModel
from ..model.protocol import Reader
from ..model.transformer import Transformer
from ..registry import resolve
from .base import transformed

_made: WeakKeyDictionary[Transformer, dict[str, Transformer]] = WeakKeyDictionary()
_making = Lock()


def copy_of(model: Reader, spec: str) -> Transformer:
    """What the transformation `spec` makes of a model, which must read no text for that; kept as long as the model."""
    if not isinstance(model, Transformer):
        raise UnsupportedModel(
            "only decoders that this package runs itself can be transformed: this has an encoder, or is run by others"
        )
    with _making:
        copies = _made.setdefault(model, {})
        if spec not in copies:
            copies[spec], _ = transformed(model, [resolve("transform", spec)])
        return copies[spec]
