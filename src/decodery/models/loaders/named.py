"""Models that a method's settings name."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeVar

from decodery.core.errors import SettingsError

from ..protocol import LanguageModel, Reader
from ..transformers.live import is_live, language_model

if TYPE_CHECKING:
    from .load import LoadedModel

Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
"""What a model is loaded in; auto is its own precision."""

R = TypeVar("R", bound=Reader)

_KEPT = 4
"""Models by name that stay loaded."""
_loaded: dict[tuple[str, Precision], tuple[object, LoadedModel]] = {}
_loading = Lock()


def named(model: R | str, dtype: Precision = "auto") -> R | LanguageModel:
    """The model itself, or the one that `decodery.load` knows by this name, in this precision.

    A model of `transformers` that is in memory already stands for the language model that is made of it.

    Raises:
        SettingsError: For the precision of a model that has it already.
    """
    if isinstance(model, str):
        return loaded(model, dtype).model
    if dtype != "auto":
        raise SettingsError(f"dtype={dtype} is for a second model given by name: name one, or leave dtype out")
    if is_live(model):
        return language_model(model)
    return model


def loaded(name: str, dtype: Precision = "auto") -> LoadedModel:
    """What `decodery.load` knows by a name, loaded once for as long as its files stay as they are.

    Args:
        name: an embedded model, a folder, a file or a Hub id.
        dtype: the precision.

    Returns:
        The model, of the files as they are now; a text that has begun keeps the model that it began with.

    Raises:
        ModelNotFound, CorruptFile, UnsupportedModel: as `decodery.load`.
    """
    from .load import load
    from .source import identity

    key = name, dtype
    with _loading:
        now = identity(name)
        before, found = _loaded.pop(key, (None, None))
        if found is None or before != now:
            # The model of other files is let go before there is a second one in memory.
            found = None
            found = load(name, dtype=dtype)
            # An embedded model that was not here yet is known by its contents from now on.
            now = now if isinstance(now, tuple) else identity(name)
        _loaded[key] = now, found
        if len(_loaded) > _KEPT:
            del _loaded[next(iter(_loaded))]
        return found
