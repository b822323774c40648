"""The reference of the Python API, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import decodery
from decodery.core.docstrings import LISTS, entries, split

_CLASSES = ("LLM", "SamplingParams", "Output", "Piece", "StreamOutput")
"""Classes in the order of the page. What `decodery` does not export is left out."""
_FUNCTIONS = ("load", "remote", "generate", "stream", "serve", "methods")
_INNER = {"begin", "conversation", "fill", "output", "request_for"}
"""Methods of classes that only other parts of this package call."""


def python_api() -> str:
    """All public functions and classes of the package."""
    exported = set(decodery.__all__)
    parts = [_callable(name, getattr(decodery, name)) for name in _FUNCTIONS if name in exported]
    parts += ["\n\n".join(_class(name, getattr(decodery, name))) for name in _CLASSES if name in exported]
    return "\n\n".join(parts)


def _class(name: str, cls: type) -> Iterator[str]:
    yield f"### {name}\n\n{_markdown(cls)}"
    for each, found in inspect.getmembers(cls):
        raw = inspect.getattr_static(cls, each)
        if each.startswith("_") or each in _INNER or not inspect.getdoc(found):
            continue
        if isinstance(raw, classmethod | staticmethod) or inspect.isfunction(found):
            yield _callable(f"{name}.{each}", found, level=4)


def _callable(name: str, function: Any, level: int = 3) -> str:
    heading = f"{'#' * level} {name}"
    return f"{heading}\n\n```text\n{_signature(name, function)}\n```\n\n{_markdown(function)}"


def _signature(name: str, function: Any) -> str:
    """The call, one line where it fits in 100 columns, else one parameter a line."""
    signature = inspect.signature(function)
    parameters, starred = list[str](), False
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not starred:
            parameters.append("*")
        starred = starred or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        parameters += _unpacked(each, function) if each.kind is each.VAR_KEYWORD else [_parameter(each)]
    returned = signature.return_annotation
    result = "" if returned is signature.empty else f" -> {_shown(returned)}"
    short = f"{name}({', '.join(parameters)}){result}"
    if len(short) <= 100:
        return short
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){result}"


def _unpacked(parameter: inspect.Parameter, function: Any) -> list[str]:
    """The keys that `**settings: Unpack[Keys]` stands for; the parameter itself where it stands for any."""
    found = re.fullmatch(r"Unpack\[(\w+)\]", _shown(parameter.annotation))
    keys = found and inspect.unwrap(function).__globals__.get(found[1])
    if not keys:
        return [_parameter(parameter)]
    annotations = {name: each for base in reversed(_bases(keys)) for name, each in base.__annotations__.items()}
    return [f"{name}: {_shown(each)} = ..." for name, each in annotations.items()]


def _parameter(parameter: inspect.Parameter) -> str:
    empty, star = parameter.empty, {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is empty else f": {_shown(parameter.annotation)}"
    default = parameter.default
    value = f'"{default}"' if isinstance(default, str) else "..." if callable(default) else str(default)
    return f"{star}{parameter.name}{typed}" + ("" if default is empty else f" = {value}")


def _bases(keys: Any) -> list[Any]:
    return [
        keys,
        *(base for each in getattr(keys, "__orig_bases__", ()) if hasattr(each, "__total__") for base in _bases(each)),
    ]


def _shown(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation)).replace("'", "").replace("typing.", "")


def _markdown(found: Any) -> str:
    """A docstring with its sections as lists."""
    text, sections = split(found.__doc__)
    parts = ["\n".join(_escaped(line) for line in text.splitlines())]
    for heading, section in sections.items():
        parts.append(f"**{heading}**")
        if heading in LISTS:
            parts.append("\n".join(f"- `{name}`: {_escaped(line)}" for name, line in entries(section).items()))
        else:
            parts.append("\n".join(_escaped(line) for line in section.splitlines()))
    return "\n\n".join(parts)


def _escaped(line: str) -> str:
    """A line in which nothing but code spans is markup."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in re.split(r"(`[^`]*`)", line)
    )


SECTIONS: dict[str, Callable[[], str]] = {"python-api": python_api}
