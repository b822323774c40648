"""PyTorch's threads: small operations stay on one, and a fork leaves none after that the child would wait for."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, local

import torch

_lock = Lock()
_inside = 0
_threads = 1


class _Here(local):
    """How deep this Python thread is inside `one_thread`."""

    depth = 0


_here = _Here()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, and within functions it decorates, PyTorch works on one thread.

    Looking up eight embeddings or warping a row of 50,000 logits is just enough work for PyTorch to wake its other
    threads, which then watch for more for milliseconds and hold the cores that the native kernels need: a pass over
    eight rows took 14 ms with them and 6.5 ms without. The setting is the whole process's: of calls that overlap in
    several Python threads the first one in changes it and the last one out restores it.
    """
    global _inside, _threads
    if _here.depth == 0:
        with _lock:
            if _inside == 0:
                _threads = torch.get_num_threads()
            _inside += 1
            torch.set_num_threads(1)
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        # What is left inside another one is still on one thread.
        if _here.depth == 0:
            with _lock:
                _inside -= 1
                # OpenMP keeps the number per calling thread, so each one that leaves restores its own.
                torch.set_num_threads(_threads)


_HARD = 2
"""`omp_pause_hard` of OpenMP 5."""


def _release_threads() -> None:
    """Before a fork: have GNU's OpenMP end the threads of its pool; both processes start new ones when they need some.

    A child has the parent's pool without its threads, and would wait for them for ever at its first parallel loop.
    Other implementations of OpenMP see to that themselves.
    """
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for library in {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}:
            with suppress(AttributeError):
                ctypes.CDLL(library).omp_pause_resource_all(_HARD)


def _forget_callers() -> None:
    """After a fork: whichever other threads were inside `one_thread` are not here."""
    global _lock, _inside
    here = _here.depth > 0
    if not here and (_lock.locked() or _inside):
        torch.set_num_threads(_threads)
    _lock, _inside = Lock(), int(here)


if sys.platform == "linux":
    os.register_at_fork(before=_release_threads, after_in_child=_forget_callers)
