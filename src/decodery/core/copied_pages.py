"""Memory whose copies share its pages until they are written."""

from __future__ import annotations

import mmap
import os

import numpy as np


class CopiedPages:
    """Bytes, all 0 at first; a copy takes memory and time for the pages that are written in it alone.

    Where the system has no files in memory a copy takes all of them at once.

    Args:
        size: How many.
        bytes: [size] uint8.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, dtype=np.uint8)
        self._file: int | None = None

    def copy(self) -> CopiedPages:
        """Another one with what this one holds at its first copy; nothing may be written here after that."""
        clone = object.__new__(CopiedPages)
        clone._file = None
        if not hasattr(os, "memfd_create"):
            clone.bytes = self.bytes.copy()
            return clone
        if self._file is None:
            self._file = os.memfd_create("decodery")
            with open(self._file, "wb", closefd=False) as file:
                file.write(self.bytes)
        clone.bytes = np.frombuffer(mmap.mmap(self._file, len(self.bytes), access=mmap.ACCESS_COPY), dtype=np.uint8)
        return clone

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]
