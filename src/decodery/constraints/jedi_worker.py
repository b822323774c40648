"""The process in which `jedi` looks at code.

It is run as a file by a `WorkerPool`, not as a module of this package, so that nothing but jedi is loaded.
"""

from __future__ import annotations

import gc
import keyword
from collections.abc import Callable
from typing import Any

import jedi
from parso import split_lines


def begin(folder: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Configure jedi in this process.

    Args:
        folder: An empty one, in which jedi may keep what it has read, for this process alone.
    """
    # Syntax trees are made of many small objects that stay; looking through them again and again takes a third longer.
    gc.set_threshold(100_000, 20, 20)
    # Nothing is read from a cache that others may have written, and nothing is imported unasked.
    jedi.settings.cache_directory = folder
    jedi.settings.auto_import_modules = []
    # The stubs of the built-in types are read once; the first question should not have to wait for that.
    names({"code": "''.", "path": None, "project": folder, "guess": True})
    return answer


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """`names`, or that nothing is known: jedi fails on some texts with errors of any kind."""
    try:
        return names(question)
    except MemoryError:
        raise
    except Exception as error:
        return {"names": [], "known": False, "error": f"{type(error).__name__}: {error}"}


def names(question: dict[str, Any]) -> dict[str, Any]:
    """What may stand after the dot that ends a file.

    Returns:
        A dictionary. "names" are the attributes that jedi finds, sorted; "known" is False if there may be others,
        because a class computes attributes or derives from one that is not found.
    """
    # What calls elsewhere pass to a function is an example of what it takes, no list of it.
    jedi.settings.dynamic_params = question["guess"]
    script = jedi.Script(
        question["code"],
        path=question["path"],
        environment=jedi.InterpreterEnvironment(),
        project=jedi.Project(question["project"], load_unsafe_extensions=False),
    )
    lines = split_lines(question["code"])
    found = {each.name for each in script.complete(len(lines), len(lines[-1]))}
    proper = sorted(name for name in found if name.isidentifier() and not keyword.iskeyword(name))
    # What every object has, and every module: where neither is there, a part of what it inherits is missing.
    whole = "__class__" in found or "__name__" in found
    return {"names": proper, "known": whole and "__getattr__" not in found}
