"""What the kernel refuses a program for which nothing else stands in the way: tried out, not assumed.

Runs in place of a program, without the guard. Nothing but the standard library.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import Any


def refused(
    outside: str, port: int, service: str, others: int, limits: dict[str, int], most_bytes: int
) -> dict[str, bool]:
    """What is attempted, and whether it failed as it should.

    Args:
        outside: A file that everyone may change, not in the folder.
        port, service: A port of this machine and a local socket at which a server listens.
        others: A process that is not this one.
    """

    def send() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(service)

    def start() -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    attempts: dict[str, Callable[[], Any]] = {
        "network": send,
        "local services": ask,
        "processes": start,
        "writing outside": lambda: open(outside, "a").close(),
        "changing files outside": lambda: os.utime(outside),
        "reading outside": lambda: open(outside).close(),
        "signals": lambda: os.kill(others, 0),
    }
    found = {name: _fails(attempt) for name, attempt in attempts.items()}
    held = {name: resource.getrlimit(getattr(resource, name))[1] for name in limits if hasattr(resource, name)}
    for what, name in (("processor time", "RLIMIT_CPU"), ("memory", "RLIMIT_AS"), ("size of a file", "RLIMIT_FSIZE")):
        found[what] = held.get(name) == limits.get(name) is not None and _fails(partial(_raise, name))
    disk = os.statvfs(".")
    found["disk space"] = disk.f_blocks * disk.f_frsize <= most_bytes
    return found


def _raise(name: str) -> None:
    kind = getattr(resource, name)
    most = resource.getrlimit(kind)[1] + 1
    resource.setrlimit(kind, (most, most))


def _fails(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except (OSError, ValueError):
        return True
    return False
