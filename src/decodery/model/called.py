"""What the models of this process were loaded as, for advice that names them."""

from __future__ import annotations

import shlex
from typing import cast
from weakref import WeakKeyDictionary

from .own_caches import bare
from .protocol import LanguageModel, Reader

DEFAULT = "smollm2"
"""What commands take where no model is named."""
_called: WeakKeyDictionary[LanguageModel, str] = WeakKeyDictionary()


def call(model: LanguageModel, name: str) -> None:
    """Remember the name that a user gave for a model."""
    _called[model] = name


def option(model: Reader) -> str:
    """The option of a command that names a model.

    Args:
        model: what a command is to be for.

    Returns:
        " -m NAME", " -m MODEL" where the name is not known, "" for the model that commands take by default.
    """
    name = _called.get(cast(LanguageModel, bare(model)), "MODEL")
    return "" if name == DEFAULT else f" -m {shlex.quote(name)}"
