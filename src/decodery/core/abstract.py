"""What a base type asks of the classes that derive from it, and what is said to one that leaves something out."""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any


class Contract(ABC):  # noqa: B024 - what is abstract is for each base to say
    """A base type: subclasses define its abstract methods, whose docstrings say what to write.

    Raises:
        TypeError: With what to define, where an object is made of a class that leaves something out.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        require_complete(cls)
        return super().__new__(cls)


def require_complete(cls: type) -> None:
    """Raise TypeError if a class lacks abstract methods of its bases, with each of them."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"{cls.__name__} is not complete: define {' and '.join(_said(cls, name) for name in missing)}")


def _said(cls: type, name: str) -> str:
    """Name, arguments and summary of what is missing."""
    member = inspect.getattr_static(cls, name)
    function: Any = member.fget if isinstance(member, property) else member
    arguments = [str(each).partition(":")[0] for each in inspect.signature(function).parameters.values()]
    call = " (a property)" if isinstance(member, property) else f"({', '.join(arguments[1:])})"
    summary = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    return f"{name}{call}" + (f', "{summary}"' if summary else "")
