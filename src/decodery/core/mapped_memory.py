"""Memory by the page: anonymous, of tensors mapped from a file, and what other libraries freed."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python does not name: if addresses counted as memory, the process could not fork."""


def anonymous(size: int) -> mmap.mmap:
    """Zeros that take memory where they are touched, on huge pages where the system grants them.

    A process that was forked writes to them for itself alone: few systems grant huge pages to shared memory.

    Args:
        size: Bytes.

    Raises:
        OSError: If the system has not so many addresses, or on Windows not so much memory, to give.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    own = mmap.MAP_PRIVATE | (_NO_RESERVE if sys.platform == "linux" else 0)
    memory = mmap.mmap(-1, size, flags=own | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def mapped_files() -> list[tuple[int, int]]:
    """Where safetensors files are mapped, [begin, end) of each; none where the system does not tell."""
    found = []
    for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
        if line.endswith(".safetensors"):
            begin, end = line.split(maxsplit=1)[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def forget(tensor: torch.Tensor, files: list[tuple[int, int]]) -> None:
    """Give back the memory of a tensor that lies in one of these files and was never written to.

    Of others, nothing.
    """
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    # Memory without a file would come back as zeros.
    if any(first <= begin and end <= last for first, last in files):
        discard(begin, end)


def discards() -> bool:
    """Whether `discard` gives memory back on this system."""
    return sys.platform.startswith("linux")


def discard(begin: int, end: int) -> None:
    """Give back the whole pages of memory between two addresses; Windows keeps them.

    They are read as their file has them, or as zeros.
    """
    page = mmap.PAGESIZE
    begin, end = -(-begin // page) * page, end // page * page
    if end > begin and sys.platform != "win32":
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def trim() -> None:
    """Give memory that was freed back to the system; reading a large vocabulary takes four times its size."""
    if sys.platform.startswith("linux") and (give_back := getattr(_libc(), "malloc_trim", None)) is not None:
        give_back(ctypes.c_size_t(0))
