"""The process in which generated programs run: it gives up what it can, then runs one program and its tests.

It is run as a file and imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_DENIED = (
    *("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.kill"),
    *("signal.pthread_kill", "pty.", "webbrowser.", "urllib.Request", "ftplib.", "http.client", "smtplib.", "os.chown"),
    *("os.chmod", "os.setxattr", "os.removexattr", "sys.addaudithook", "gc.get_objects", "code.__new__"),
)
"""Audit events, by how they begin, that end in an error."""
_WRITING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.utime")
"""Audit events that change files: allowed in the program's own folder."""


class _TooLong(BaseException):
    """A test took its time; not an Exception, so that programs do not catch it by accident."""


def _isolate(limits: dict[str, int]) -> None:
    """Leave the network, where the system lets processes do so, and take on the limits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NET)
    for name, most in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            resource.setrlimit(kind, (most, most))


def _guard(folder: str) -> None:
    """Refuse what programs under test have no business with: a guard against accidents, which attackers get around."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_DENIED):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        writes = event.startswith(_WRITING)
        if event == "open":
            path, _, flags = arguments
            writes = not isinstance(path, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        if writes:
            for path in arguments[: 1 if event == "open" else 2]:
                inside = isinstance(path, int) or (os.path.realpath(os.fsdecode(path)) + "/").startswith(folder + "/")
                if not inside:
                    raise PermissionError(f"the sandbox lets programs write in their own folder only, not {path!r}")

    sys.addaudithook(hook)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def main() -> None:
    job = json.load(sys.stdin)
    results = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    folder = os.path.realpath(os.getcwd())

    def late(*_: object) -> None:
        raise _TooLong("it took too long")

    def attempt(text: str, name: str, variables: dict[str, Any], seconds: float) -> str | None:
        """Run a text; returns what went wrong."""
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            exec(compile(text, name, "exec"), variables)
        except BaseException as error:
            return _said(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return None

    signal.signal(signal.SIGALRM, late)
    _isolate(job["limits"])
    _guard(folder)
    variables: dict[str, Any] = {"__name__": "__main__"}
    wrong = attempt(job["program"], "<program>", variables, job["seconds"])
    results.write(json.dumps(wrong) + "\n")
    for test in job["tests"] if wrong is None else ():
        results.write(json.dumps(attempt(test, "<test>", dict(variables), job["seconds"])) + "\n")
    results.flush()
    sys.stdout.flush()
    # Whatever the program left running or registered for the end is not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
