"""The names that a package of methods exports, such as `decodery.sampling.TopP`: imported when they are used.

They come from the static index, so that neither importing the package nor listing them imports PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .catalogue import FAMILY_OF, shown


def face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a family's package.

    It exports the classes that its modules register and the names in their `__all__`. Its modules and packages are
    found by their names, too.
    """
    family = FAMILY_OF[package.partition(".")[2]]

    def get(name: str) -> Any:
        homes = shown(family)
        if name == "__all__":
            return list(homes)
        if name not in homes:
            return submodule(package, name)
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*shown(family), *(name for name in vars(sys.modules[package]) if name != face.__name__)})

    return get, names


def submodule(package: str, name: str) -> Any:
    """The module or package `name` of a package.

    Raises:
        AttributeError: If there is none.
    """
    if name.startswith("_") or find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return import_module(f"{package}.{name}")
