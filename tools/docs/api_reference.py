"""The reference of the Python API and of `decodery.extend`, from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from docstrings import call, escaped, markdown, shown_type

import decodery
from decodery import extend

_CLASSES = ("LLM", "SamplingParams", "Output", "Piece", "StreamOutput", "Engine")
"""Classes in the order of the page. What `decodery` does not export is left out."""
_FUNCTIONS = ("load", "remote", "generate", "chat", "stream", "serve", "methods")
_INNER = {"begin", "conversation", "fill", "output", "request_for"}
"""Methods of classes that only other parts of this package call."""
_BASES = {
    *("Drafter", "TreeDrafter", "TreePolicy", "DraftLengthPolicy", "AcceptanceRule", "LogitsProcessor", "LogitsSource"),
    *("Blend", "Constraint", "ConstraintSpec", "Scorer", "Search", "CachePolicy", "AttentionPolicy", "Monitor"),
    *("UnmaskingPolicy", "DiffusionDecoder", "DiffusionCache", "ExpertSharing", "ModelCompression"),
    *("SimultaneousPolicy", "Branches"),
}
"""What authors of methods derive from or call most; the other types come after."""


def python_api() -> str:
    """All public functions and classes of the package."""
    exported = set(decodery.__all__)
    parts = [_function(name, getattr(decodery, name)) for name in _FUNCTIONS if name in exported]
    parts += ["\n\n".join(_class(name, getattr(decodery, name))) for name in _CLASSES if name in exported]
    return "\n\n".join(parts)


def extend_api() -> str:
    """Everything that `decodery.extend` has, in four groups."""
    names = {name: getattr(extend, name) for name in sorted(dir(extend)) if not name.startswith("_")}
    ours = {name: each for name, each in names.items() if getattr(each, "__module__", "").startswith("decodery.")}
    bases = {name: each for name, each in ours.items() if name in _BASES}
    types = {name: each for name, each in ours.items() if isinstance(each, type) and name not in bases}
    calls = {name: each for name, each in ours.items() if name not in bases and name not in types}
    groups: dict[str, dict[str, Any]] = {
        "Base classes": bases,
        "Functions": {name: each for name, each in calls.items() if not name.startswith("check_")},
        "Checks": {name: each for name, each in calls.items() if name.startswith("check_")},
        "Types": types,
    }
    return "\n\n".join(
        "\n\n".join([f"## {title}", *(_entry(name, each) for name, each in found.items())])
        for title, found in groups.items()
    )


def _entry(name: str, found: Any) -> str:
    return "\n\n".join(_class(name, found)) if isinstance(found, type) else _function(name, found)


def _class(name: str, cls: type) -> Iterator[str]:
    yield f"### {name}"
    if (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")) and not inspect.isabstract(cls):
        yield f"```text\n{call(name, cls)}\n```"
    elif issubclass(cls, enum.Enum):
        yield "Values: " + ", ".join(f"`{each.name}`" for each in cls) + "."
    if told := _own_docstring(cls):
        yield told
    properties = []
    for each, found in inspect.getmembers(cls):
        raw = inspect.getattr_static(cls, each)
        if each.startswith("_") or each in _INNER or not _ours(cls, each):
            continue
        if isinstance(raw, property) and inspect.getdoc(raw):
            returned = raw.fget.__annotations__.get("return", "") if raw.fget else ""
            summary = (inspect.getdoc(raw) or "").splitlines()[0]
            properties.append(f"- `{each}` ({escaped(shown_type(returned))}): {escaped(summary)}")
        elif (isinstance(raw, classmethod | staticmethod) or inspect.isfunction(found)) and inspect.getdoc(found):
            yield _function(f"{name}.{each}", found, level=4)
    if properties:
        yield f"#### Properties of {name}\n\n" + "\n".join(properties)


def _own_docstring(cls: type) -> str:
    """The docstring, unless it is the signature that a dataclass gets by itself."""
    text = markdown(cls)
    return "" if text.startswith(f"{cls.__name__}(") else text


def _ours(cls: type, member: str) -> bool:
    """Whether a member is defined in this package, and not by Python's own bases of tuples and enumerations."""
    home = next((base for base in cls.__mro__ if member in vars(base)), object)
    return home.__module__.startswith("decodery")


def _function(name: str, function: Any, level: int = 3) -> str:
    # One signature lists all settings of a request; the others refer to it.
    signature = call(name, function, _defaults() if name == "LLM.generate" else None)
    parts = [f"{'#' * level} {name}", f"```text\n{signature}\n```", markdown(function)]
    if name != "LLM.generate" and "Unpack[RequestSettings]" in signature:
        parts.append("`**settings`: those of [LLM.generate](#llmgenerate).")
    return "\n\n".join(part for part in parts if part)


def _defaults() -> dict[str, Any]:
    """The defaults of a request's settings."""
    neutral = {field.name: field.default for field in dataclasses.fields(decodery.SamplingParams)}
    given = inspect.signature(decodery.LLM.request).parameters
    return neutral | {name: each.default for name, each in given.items() if each.default is not each.empty}


SECTIONS: dict[str, Callable[[], str]] = {"python-api": python_api, "extend-api": extend_api}
