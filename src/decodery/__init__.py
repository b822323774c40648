"""Every way of decoding a language model, in one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Ordered

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
    from .core.conversation import Message
    from .core.registry import methods
    from .engine.engine import Engine
    from .llm.llm import LLM, AnyPrompt, Output, Piece
    from .llm.remote import remote
    from .llm.sampling_params import ChatSettings, GenerateSettings
    from .llm.sampling_params import SamplingParams as SamplingParams


__all__ = [
    "LLM",
    "Engine",
    "Output",
    "Piece",
    "SamplingParams",
    "chat",
    "generate",
    "load",
    "methods",
    "remote",
    "stream",
]

_HOMES = {
    "LLM": ".llm.llm",
    "Output": ".llm.llm",
    "Piece": ".llm.llm",
    "Engine": ".engine.engine",
    "methods": ".core.registry",
    "remote": ".llm.remote",
    "SamplingParams": ".llm.sampling_params",
}


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of `load`."""

    dtype: str
    kv_dtype: str
    device: str
    revision: str | None
    masking: str | None
    tensor_parallel_size: int


def load(model: str = "smollm2", **options: Unpack[LoadOptions]) -> LLM:
    """Load a model.

    Args:
        model: An embedded name, a folder, a `.gguf` file, a Hub id, or the URL of a server (see `remote`).
        **options: `dtype`: "auto" (the checkpoint's own precision), "float32", "bfloat16", "float16", "int8" or "int4".
            `kv_dtype`: precision of the KV cache, "auto", "float16", "int8" or (GPU) "float8". `device`: "auto", "cpu"
            or "cuda". `revision`: of a Hub id. `masking`: how an adapted diffusion model whose files do not say so
            fills masks, such as "mask=<|mask|>,shifted=true,block=32". `tensor_parallel_size`: how many processes of
            `torchrun` share the model.

    Raises:
        ModelNotFound: There is no such model.
        UnsupportedModel: Its architecture or format is not supported.
        CorruptFile: A file of it is damaged.
    """
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        from .llm.remote import remote

        # A server has chosen all of these itself.
        own = {("dtype", "auto"), ("kv_dtype", "auto"), ("masking", None)}
        given: dict[str, Any] = {key: value for key, value in options.items() if (key, value) not in own}
        return remote(model, **given)
    from .llm.llm import LLM
    from .models.loaders.load import load as load_model

    return LLM(load_model(model, **options))


def generate(
    prompt: AnyPrompt, model: str = "smollm2", *, n: int = 1, **settings: Unpack[GenerateSettings]
) -> Output | list[Output]:
    """Load `model` and decode one prompt; see `LLM.generate`.

    To decode more than one, load the model once.

    Args:
        prompt: A text.
        model: What `load` takes.
        settings: See `LLM.generate`.
    """
    return load(model).generate(prompt, n=n, **settings)


def chat(
    messages: Ordered[Message], model: str = "smollm2", *, n: int = 1, **settings: Unpack[ChatSettings]
) -> Output | list[Output]:
    """Load `model` and answer one conversation; see `LLM.chat`."""
    return load(model).chat(messages, n=n, **settings)


def stream(prompt: AnyPrompt, model: str = "smollm2", **settings: Unpack[GenerateSettings]) -> Iterator[Piece]:
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
