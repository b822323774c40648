"""Every way of decoding a language model, in one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from . import (
        compression,
        constraints,
        diffusion,
        extras,
        kv_cache,
        logits_sources,
        monitors,
        sampling,
        scorers,
        search,
        speculative,
        testing,
        training,
    )
    from .core.registry import methods
    from .engine.engine import Engine
    from .llm.llm import LLM, Output, Piece
    from .llm.remote import remote
    from .llm.sampling_params import SamplingParams as SamplingParams


__all__ = ["LLM", "Engine", "Output", "Piece", "SamplingParams", "generate", "load", "methods", "remote", "stream"]

_HOMES = {
    "LLM": ".llm.llm",
    "Output": ".llm.llm",
    "Piece": ".llm.llm",
    "Engine": ".engine.engine",
    "methods": ".core.registry",
    "remote": ".llm.remote",
    "SamplingParams": ".llm.sampling_params",
}


def load(name: str = "smollm2", **options: Any) -> LLM:
    """Load a model: an embedded name, a folder, a `.gguf` file, a Hub id or a server's URL.

    Args:
        name: An embedded name, a path, a Hub id or a URL.
        options: `dtype` ("auto": the checkpoint's own precision, "float32", "bfloat16", "float16", "int8", "int4"),
            `kv_dtype` ("float16" halves what a text keeps in memory, "int8" quarters it, "auto"), `device`, `revision`.
    """
    if isinstance(name, str) and name.startswith(("http://", "https://")):
        from .llm.remote import remote

        # A server has chosen all of these itself.
        own = {("dtype", "auto"), ("kv_dtype", "auto")}
        return remote(name, **{key: value for key, value in options.items() if (key, value) not in own})
    from .llm.llm import LLM
    from .models.loaders.load import load as load_model

    return LLM(load_model(name, **options))


def generate(prompt: Any, model: str = "smollm2", **settings: Any) -> Output | list[Output]:
    """Load `model` and decode one prompt; see `LLM.generate`.

    To decode more than one, load the model once.

    Args:
        prompt: A text.
        model: What `load` takes.
        settings: See `LLM.generate`.
    """
    return load(model).generate(prompt, **settings)


def stream(prompt: Any, model: str = "smollm2", **settings: Any) -> Any:
    """Load `model` and stream one text; see `LLM.stream`.

    Args:
        prompt: A text.
        model: What `load` takes.
        settings: See `LLM.stream`.
    """
    return load(model).stream(prompt, **settings)


def __getattr__(name: str) -> Any:
    # Heavy modules are imported when their names are first used, so that `decodery --help` is instant.
    from importlib import import_module

    from .core.lazy_exports import submodule

    if name not in _HOMES:
        return submodule(__name__, name)
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    from pkgutil import iter_modules

    return sorted({*globals(), *__all__, *(module.name for module in iter_modules(__path__))})
