"""Work on single vocabulary rows stays on one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_lock = Lock()
_inside = 0
_threads = 1


def one_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Runs `function` with one PyTorch thread.

    A row of 50,000 logits is just long enough for PyTorch to split it, and waking the other threads takes several
    times as long as the work. The setting is the whole process's: of calls that overlap in several Python threads the
    first one in changes it and the last one out restores it.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        _enter()
        try:
            return function(*args, **kwargs)
        finally:
            _leave()

    return wrapped


def _enter() -> None:
    global _inside, _threads
    with _lock:
        if _inside == 0:
            _threads = torch.get_num_threads()
        _inside += 1
        torch.set_num_threads(1)


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        # OpenMP keeps the number per calling thread, so each one that leaves restores its own.
        torch.set_num_threads(_threads)
