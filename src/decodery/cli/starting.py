"""The start of a command that needs a model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """Within it, Python does not look for garbage.

    Modules and models live as long as the process, and looking through them again and again while they are made takes
    a second of a start.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
