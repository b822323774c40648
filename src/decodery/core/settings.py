"""Settings given by name in Python: one sentence for a name that does not exist or a value of the wrong type."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from .errors import SettingsError

F = TypeVar("F", bound=Callable[..., Any])

_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "truth values"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    type(None): ("None", "None"),
}
"""One and several values of a type."""


def checked(
    *further: Callable[..., Any], but: Collection[str] = (), elsewhere: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Decorate a function whose keyword-only arguments are settings, checked by their annotations.

    Raises SettingsError.

    Args:
        further: Functions that get what else is given, all but the arguments in `but`; without them a function with
            `**settings` leaves names it does not know to whomever it hands them to.
        elsewhere: What to do where one of these names is given, which belong to other functions or other tools; it
            holds for functions with `**settings` too.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        open_ended = not further and any(each.kind is each.VAR_KEYWORD for each in parameters)

        @functools.cache
        def kinds() -> dict[str, Any]:
            # Not before the first call: annotations may name what is defined below the function.
            own = _kinds(function)
            return {name: kind for each in further for name, kind in _kinds(each).items() if name not in but} | own

        @functools.wraps(function)
        def call(*arguments: Any, **settings: Any) -> Any:
            for name, value in settings.items():
                if name in kinds():
                    settings[name] = value = plain(value, kinds()[name])
                    if not _fits(value, kinds()[name]):
                        raise SettingsError(f"{name} must be {_words(kinds()[name])}, not {value!r:.80}")
                elif not open_ended or name in (elsewhere or ()):
                    raise SettingsError(f"there is no setting {name!r}; {advice(name, kinds(), elsewhere or {})}")
            return function(*arguments, **settings)

        return typing.cast(F, call)

    return decorate


def advice(name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """What to do in place of a setting that does not exist.

    As `elsewhere` says, else the names most like it.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
    return elsewhere.get(name) or f"try {', '.join(near)}"


def plain(value: Any, kind: Any = Any) -> Any:
    """A setting without numpy's types.

    Scalars become Python's; arrays become lists where a list is one of `kind`.

    Raises:
        SettingsError: For one that is nested too deeply to be looked through.
    """
    try:
        return _plain(value, kind)
    except RecursionError:
        raise SettingsError("a setting is nested too deeply: make it flatter") from None


def _plain(value: Any, kind: Any) -> Any:
    # By name: most that need settings need no numpy, which takes a while to import.
    if type(value).__module__ == "numpy":
        if not getattr(value, "shape", True):
            return value.item()
        return value.tolist() if kind is not Any and hasattr(value, "tolist") else value
    if type(value) in (list, tuple):
        return type(value)(_plain(item, Any) for item in value)
    if type(value) is dict:
        return {_plain(key, Any): _plain(item, Any) for key, item in value.items()}
    return value


def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Types of the arguments that are given by name."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.items()
    return {name: hints[name] for name, each in parameters if each.kind is each.KEYWORD_ONLY}


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if origin is None or isinstance(value, str):
        return isinstance(value, origin or kind) and not (origin and isinstance(value, str))
    if not isinstance(value, origin):
        return False
    # What can be looked at again is; an iterator could not be read twice.
    return origin is not collections.abc.Sequence or all(_fits(item, arguments[0]) for item in value)


def _words(kind: Any) -> str:
    return " or ".join(_each(kind))


def _each(kind: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in arguments:
            yield from _each(member)
    elif kind in _WORDS:
        yield _WORDS[kind][0]
    elif origin is not None and issubclass(origin, Mapping):
        yield "a mapping of " + " to ".join(_WORDS[argument][1] for argument in arguments)
    elif origin is not None:
        yield "a list" + (f" of {_WORDS[arguments[0]][1]}" if arguments[0] in _WORDS else "")
    else:
        yield f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
