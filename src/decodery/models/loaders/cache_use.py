"""When something in the cache was last used, and whether a process uses it now: told by an empty file beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_SUFFIX = ".used"


def mark_of(path: Path) -> Path:
    """The file that tells of the uses of `path`, whose own time is that of what was read into it."""
    return path.with_name(path.name + _SUFFIX)


def is_mark(path: Path) -> bool:
    """Whether a file tells of the uses of another one."""
    return path.suffix == _SUFFIX


def last_used(path: Path) -> float:
    """When `path` was last used, in seconds since 1970; before its first use, when it was written."""
    for each in (mark_of(path), path):
        try:
            return each.stat().st_mtime
        except OSError:
            continue
    return 0.0


def use(path: Path) -> Callable[[], None]:
    """Note that `path` is used from now on, until what is returned is called or the process ends.

    Where the cache cannot be written nothing is noted.
    """
    mark = mark_of(path)
    try:
        number = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return lambda: None
    try:
        os.utime(mark)
        if sys.platform != "win32":
            fcntl.flock(number, fcntl.LOCK_SH)
    except OSError:
        # On a file system without locks it is only known when it was used.
        pass
    return lambda: os.close(number)


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether no process uses `path`; then none begins to before the block ends.

    On Windows the answer is always yes: there a mark that is open cannot be moved, nor the folder that it lies in.
    """
    mark = mark_of(path)
    if sys.platform == "win32" or not mark.exists():
        yield True
        return
    number = os.open(mark, os.O_RDONLY)
    try:
        yield _taken(number)
    finally:
        os.close(number)


def _taken(number: int) -> bool:
    """Whether an open mark was ours to take alone."""
    if sys.platform != "win32":
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # A file system without locks.
            pass
    return True
