"""The process in which generated programs run: it gives up what it can, then runs one program and its tests.

It is run as a folder, so that its parts are found, and imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import add
from typing import Any


class _TooLong(BaseException):
    """A test took its time; not an Exception, so that programs do not catch it by accident."""


def _late(*_: object) -> None:
    raise _TooLong("it took too long")


def _judge(seconds: float) -> Callable[[str], bytes]:
    """A function that runs one text after another in the same variables, and tells in a line what went wrong.

    Where the first one did, the next call ends the `map` that makes it.
    """
    variables: dict[str, Any] = {}
    failed = False
    # Programs may change what these names stand for.
    limit, untrace, unprofile = signal.setitimer, sys.settrace, sys.setprofile
    quote, wrong, kind = json.encoder.encode_basestring_ascii, BaseException, type
    compiled, execute, copy = compile, exec, dict

    def run(text: str) -> str:
        try:
            try:
                limit(signal.ITIMER_REAL, seconds)
                if variables:
                    execute(compiled(text, "<test>", "exec"), copy(variables))
                else:
                    variables["__name__"] = "__main__"
                    execute(compiled(text, "<program>", "exec"), variables)
            finally:
                limit(signal.ITIMER_REAL, 0)
        except wrong as error:
            try:
                return quote(f"{kind(error).__name__}: {error}"[:300])
            except wrong:
                return quote("it ended with an error that cannot be shown")
        return "null"

    def judge(text: str) -> bytes:
        nonlocal failed
        if failed:
            raise StopIteration
        first = not variables
        line = run(text)
        failed = first and line != "null"
        untrace(None)
        unprofile(None)
        return f"{line}\n".encode()

    return judge


def _reports(results: int, key: bytes, lines: Iterator[bytes]) -> Iterator[int]:
    """Lines as they come, each signed with the key.

    No frame holds the key while programs run, only iterators that cannot be asked for it: what they see of those who
    called them is not enough to write results.
    """
    return map(partial(os.write, results), map(partial(add, key), lines))


def _job() -> dict[str, Any]:
    """What to do, from standard input, which is then closed."""
    with open(0, "rb", closefd=False) as file:
        job: dict[str, Any] = json.load(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return job


def _begin(results: int) -> Iterator[int]:
    """Confine this process, and return what runs the texts as it is gone through."""
    import guard  # type: ignore[import-not-found]
    import kernel  # type: ignore[import-not-found]
    import probe  # type: ignore[import-not-found]

    # Python began with this folder, which is none of a program's business.
    sys.path.pop(0)
    job, folder = _job(), os.path.realpath(os.getcwd())
    kernel.confine(folder, job["limits"], job["most_bytes"])
    key = job["key"].encode()
    if job["probe"]:
        found = probe.refused(**job["probe"], limits=job["limits"], most_bytes=job["most_bytes"])
        return _reports(results, key, iter([json.dumps(found).encode() + b"\n"]))
    guard.guard(folder)
    signal.signal(signal.SIGALRM, _late)
    return _reports(results, key, map(_judge(job["seconds"]), job["texts"]))


def main() -> None:
    end = os._exit
    for _ in _begin(int(sys.argv[1])):
        pass
    sys.stdout.flush()
    # Whatever the program left running or registered for the end is not waited for.
    end(0)


if __name__ == "__main__":
    main()
