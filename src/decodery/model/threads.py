"""Small PyTorch operations stay on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_lock = Lock()
_inside = 0
_threads = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, and within functions it decorates, PyTorch works on one thread.

    Looking up eight embeddings or warping a row of 50,000 logits is just enough work for PyTorch to wake its other
    threads, which then watch for more for milliseconds and hold the cores that the native kernels need: a pass over
    eight rows took 14 ms with them and 6.5 ms without. The setting is the whole process's: of calls that overlap in
    several Python threads the first one in changes it and the last one out restores it.
    """
    global _inside, _threads
    with _lock:
        if _inside == 0:
            _threads = torch.get_num_threads()
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            # OpenMP keeps the number per calling thread, so each one that leaves restores its own.
            torch.set_num_threads(_threads)
