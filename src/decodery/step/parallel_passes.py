"""Passes of two models at the same time; each releases the interpreter lock while it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

import torch

from decodery.core.native.kernels import threads_at_most
from decodery.core.threads import one_thread

T = TypeVar("T")
U = TypeVar("U")


def cores() -> int:
    """Number of compute threads."""
    return torch.get_num_threads()


def side_by_side(main: Callable[[], T], beside: Callable[[], U], *, waits: bool = False) -> tuple[T, U]:
    """Results of `main`, on all threads but one, and `beside`, on one, run at the same time.

    Where there is one thread alone and `waits` is false they run one after the other. An error of either is raised when
    both are done.

    Args:
        main: The function with most work.
        beside: A function that one thread is enough for.
        waits: `main` computes on a device of its own, and is given one thread, `beside` the others.
    """
    threads = cores()
    if threads < 2 and not waits:
        return main(), beside()
    here, there = (1, max(1, threads - 1)) if waits else (threads - 1, 1)
    done: list[U] = []
    errors: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def run() -> None:
        # Whether gradients are wanted is each thread's own.
        with torch.set_grad_enabled(grad), threads_at_most(there), one_thread():
            try:
                done.append(beside())
            except BaseException as error:
                errors.append(error)

    worker = Thread(target=copy_context().run, args=(run,), daemon=True)
    worker.start()
    try:
        with threads_at_most(here):
            found = main()
    finally:
        worker.join()
    if errors:
        raise errors[0]
    return found, done[0]
