"""How a text names a method, with its settings.

The same text, `name:key=value,key=value`, works in Python, on the command line, in requests to the server and in the
benchmark. Where a setting is itself a method, its own settings stand in parentheses:
`draft-model:tree_policy=eagle-2(nodes=32,depth=6)`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .abstract import Contract
from .catalogue import is_base
from .errors import NotTrusted, SettingMissing, SettingsError

if TYPE_CHECKING:
    from .registry import Method


def split(text: str, separator: str) -> list[str]:
    """The pieces of `text` between the separators that stand outside all parentheses and double quotes.

    Raises:
        SettingsError: If parentheses do not match.
    """
    pieces, depth = [""], 0
    for sign in _SIGN.findall(text):
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            break
        if sign == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += sign
    if depth != 0:
        raise SettingsError(_UNMATCHED.format(text))
    return pieces


def parts(spec: str) -> tuple[str, str]:
    """Name and settings of "name:settings" or "name(settings)"."""
    found = re.fullmatch(r"([^:(]*)(?:\((.*)\)|:(.*))?", spec.strip(), re.DOTALL)
    if found is None:
        raise SettingsError(_UNMATCHED.format(spec))
    return found[1].strip(), found[2] or found[3] or ""


def build(method: Method, settings: str, further: Mapping[str, Any] | None = None) -> Any:
    """An instance of `method` from the text "key=value,key=value".

    Args:
        further: Settings that are given as they are.
    """
    kinds = typing.get_type_hints(method.cls)
    if _untrusted.get() and method.local:
        raise NotTrusted(f"{method.name} reads files or runs programs, which is not for requests from a network")
    names = [field.name for field in dataclasses.fields(method.cls) if field.init]
    values = given(method.name, settings, {name: kinds[name] for name in names})
    if _untrusted.get():
        for key, value in values.items():
            _check_stranger(method, key, kinds[key], value)
    for key, value in (further or {}).items():
        if key not in names:
            raise SettingsError(f"{method.name} has no setting {key!r}; its settings are {listing(names)}")
        if key in values:
            raise SettingsError(f"{method.name}: {key} is given twice")
        values[key] = value
    if objects := [name for name in beyond_text(method) if name not in values]:
        raise SettingsError(
            f"{method.name} needs {listing(objects)}, which no text can give: build the method in Python"
        )
    if missing := [name for name in _required(method) if name not in values]:
        raise SettingMissing(f"{method.name} needs {unmet(method, missing)}")
    return method.cls(**values)


def unmet(method: Method, missing: Sequence[str]) -> str:
    """What a method lacks, in words.

    Args:
        method: The method.
        missing: Its settings that have to be given and were not.

    Returns:
        The settings and how they are given; where the method needs something that a command makes, that command.
    """
    made = [need for need in method.requirements if "`decodery train" in need]
    return "".join([f"{listing(missing)}, as in {method.name}:{missing[0]}=...", *(f"; it is {need}" for need in made)])


def given(name: str, settings: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the text "key=value,key=value", whose types are `kinds`.

    Args:
        name: Whose settings they are.
    """
    known = f"its settings are {listing(list(kinds))}" if kinds else "it has no settings"
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in split(settings, ","))):
        key, equals, text = (piece.strip() for piece in item.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise SettingsError(f"{name}: {item!r} is not key=value; {known}")
        if key not in kinds:
            raise SettingsError(f"{name} has no setting {key!r}; {known}")
        if key in values:
            raise SettingsError(f"{name}: {key} is given twice")
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]
        try:
            values[key] = _parse(text, kinds[key], "/:")
        except ValueError:
            raise SettingsError(f"{name}: {key}={text} is not {_kind_name(kinds[key])}") from None
    return values


@contextmanager
def from_network() -> Iterator[None]:
    """A context in which specs of this thread are untrusted: no setting may be a path or a model.

    Integers beyond `MOST_NUMBER` are refused too, as memory and time grow with them.
    """
    token = _untrusted.set(True)
    try:
        yield
    finally:
        _untrusted.reset(token)


def is_untrusted() -> bool:
    """Whether what is done on this thread is done for a request from a network."""
    return _untrusted.get()


def spelled(method: Any, name: str, **further: str) -> str:
    """A method as a user writes it: settings that differ from the defaults, then `further` ones."""
    own = {
        each.name: str(value)
        for each in dataclasses.fields(method)
        if each.init and isinstance(value := getattr(method, each.name), str | int | float) and value != each.default
    }
    settings = ",".join(f"{key}={value}" for key, value in {**own, **further}.items())
    return name + (f":{settings}" if settings else "")


def _check_stranger(method: Method, key: str, kind: Any, value: Any) -> None:
    if free_text(kind) and key not in method.texts and not (value is None or isinstance(value, int | float)):
        raise NotTrusted(
            f"{method.name}: {key} may name a file, a model or a program, which is not for requests from a network"
        )
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and abs(number) > MOST_NUMBER:
            raise NotTrusted(
                f"{method.name}: {key}={number} is more than a request may ask for, which is {MOST_NUMBER}"
            )


def free_text(kind: Any) -> bool:
    """Whether a setting takes any text, and that text is not the name of another method."""
    members = set(_members(kind))
    # A text may name a method where a family's base class stands; other classes that it may stand for come from files.
    nested = [each for each in members if isinstance(each, type) and issubclass(each, Contract)]
    return str in members and not any(is_base(each.__module__) for each in nested)


def _members(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) in (typing.Literal, Callable):
        return
    arguments = typing.get_args(kind)
    if not arguments:
        yield kind
    for each in arguments:
        yield from _members(each)


def beyond_text(method: Method) -> list[str]:
    """Required settings that no text can give, such as a function.

    Such a method is built in Python.
    """
    kinds = typing.get_type_hints(method.cls)
    return [name for name in _required(method) if _kind_name(kinds[name]) == _NO_TEXT]


def _required(method: Method) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(method.cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _parse(text: str, kind: Any, separators: str) -> Any:
    """`text` as a value of type `kind`; raises ValueError. separators: one per level of nested tuples."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in sorted(arguments, key=lambda each: each is str):
            try:
                return _parse(text, member, separators)
            except ValueError:
                continue
        raise ValueError(text)
    if origin is typing.Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
        raise ValueError(text)
    if origin is tuple and separators:
        parts = split(text, separators[0]) if text else []
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(parts)
        if len(arguments) != len(parts):
            raise ValueError(text)
        return tuple(_parse(part, member, separators[1:]) for part, member in zip(parts, arguments, strict=True))
    if kind in (None, type(None)) and text.lower() == "none":
        return None
    if kind is bool and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if kind is int or kind is float or kind is str:
        return kind(text)
    raise ValueError(text)


MOST_NUMBER = 1024
"""The largest integer in a stranger's settings."""

_untrusted: ContextVar[bool] = ContextVar("stranger", default=False)

_SIGN = re.compile(r'"[^"]*"|.', re.DOTALL)
"""One sign of a method's settings; what stands between double quotes is one."""

_UNMATCHED = "the parentheses in {!r} do not match: write name(key=value), or a text that holds them in double quotes"

_NO_TEXT = "something a text can give; build the method in Python"

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _kind_name(kind: Any) -> str:
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_kind_name(member) for member in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return listing([str(choice) for choice in typing.get_args(kind)], "or")
    if typing.get_origin(kind) is tuple:
        return (
            "a list like a/b/c" if typing.get_origin(typing.get_args(kind)[0]) is not tuple else "a list like a:b/c:d"
        )
    return names.get(kind, _NO_TEXT)


def listing(names: Sequence[str], last: str = "and") -> str:
    return ", ".join(names[:-1]) + f" {last} {names[-1]}" if len(names) > 1 else "".join(names)
