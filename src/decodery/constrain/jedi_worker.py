"""The process in which `jedi` looks at code: a question per line of standard input, an answer per line of its output.

It is run as a file, not as a module of this package, so that nothing but jedi is loaded.
"""

from __future__ import annotations

import json
import keyword
import os
import sys
from typing import Any

_MOST_MEMORY = 4 << 30
"""Bytes of address space; what needs more ends with an error and is not known."""


def names(question: dict[str, Any]) -> dict[str, Any]:
    """What may stand behind the dot that ends a file.

    names: the attributes jedi finds, sorted. known: False where there may be others, because a class makes attributes
    up when it is asked for them, or derives from one that is not found.
    """
    import jedi
    from parso import split_lines

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


def main() -> None:
    import jedi

    # Modules that are imported to be looked at may print: that must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Nothing is read from a cache that others may have written, and nothing is imported unasked.
    jedi.settings.cache_directory = sys.argv[1]
    jedi.settings.auto_import_modules = []
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # Windows and macOS have no such limit; that of time holds everywhere.
    # The stubs of the built-in types are read once; the first question should not have to wait for that.
    ready = names({"code": "''.", "path": None, "project": sys.argv[1], "guess": True})
    answers.write(json.dumps(ready).encode() + b"\n")
    answers.flush()
    for line in sys.stdin.buffer:
        try:
            answer = names(json.loads(line))
        except Exception as error:
            # jedi fails on some texts with errors of any kind; what it cannot look at is not known.
            answer = {"names": [], "known": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
