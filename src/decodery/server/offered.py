"""What requests may name: the methods of a server, with their settings."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from decodery.core.errors import DecoderyError
from decodery.core.method_spec import beyond_text, free_text, unmet
from decodery.core.registry import Method, methods
from decodery.diffusion.canvas import Canvas
from decodery.llm.readiness import readiness, slower
from decodery.models.protocol import LanguageModel

FAMILIES = (
    "drafter",
    "acceptance-rule",
    "draft-length",
    "logits-processor",
    "logits-source",
    "cache-policy",
    "search",
    "diffusion",
    "monitor",
)
"""Those that a request can name."""


def offered(trust: bool, model: LanguageModel) -> list[dict[str, Any]]:
    """Name, family, guarantee, first sentence and settings of every method that a request can name.

    Args:
        trust: count those that read files or run programs.
        model: what texts are written with.

    Returns:
        Settings are the defaults by name, None for those without one. `requirements` is what a method needs before it
        runs on this model with its defaults, None where it is ready; `slower`, whether it is slower here than plain
        decoding.
    """
    found = [method for family in FAMILIES for method in methods(family) if _open(method, trust)]
    missing = {(each.family, each.name): _unmet(each, model) for each in found} | readiness(found, model)
    return [
        _told(method) | {"requirements": missing[method.family, method.name] or None, "slower": slower(method, model)}
        for method in found
    ]


def _unmet(method: Method, model: LanguageModel) -> str:
    """What a search or an unmasking policy needs before it runs on a model with its defaults; "" for nothing."""
    if wanted := [each.name for each in _required(method)]:
        return f"it needs {unmet(method, wanted)}"
    try:
        method.cls()
        if method.family == "diffusion":
            Canvas.of(model, [0], 1)
    except DecoderyError as error:
        return str(error)
    return ""


def _open(method: Method, trust: bool) -> bool:
    if beyond_text(method):
        return False
    kinds = typing.get_type_hints(method.cls)
    needs_trust = any(free_text(kinds[each.name]) and each.name not in method.texts for each in _required(method))
    return trust or not (method.local or needs_trust)


def _told(method: Method) -> dict[str, Any]:
    defaults = {each.name: each.default for each in _settings(method)}
    return {
        "name": method.name,
        "family": method.family,
        "lossless": method.lossless,
        "guarantee": method.guarantee,
        "summary": method.summary,
        "settings": {
            # Defaults that no text can give stay unsaid.
            name: default if isinstance(default, str | int | float | bool) else None
            for name, default in defaults.items()
        },
    }


def _settings(method: Method) -> list[dataclasses.Field[Any]]:
    return [each for each in dataclasses.fields(method.cls) if each.init]


def _required(method: Method) -> list[dataclasses.Field[Any]]:
    none = dataclasses.MISSING
    return [each for each in _settings(method) if each.default is none and each.default_factory is none]
