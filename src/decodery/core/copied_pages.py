"""Memory whose copies share its pages until they are written."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Self

import numpy as np


class CopiedPages:
    """Bytes, all 0 at first; a copy takes memory and time for the pages that are written in it alone.

    Where the system has no files in memory a copy takes all of them at once.

    Args:
        size: How many.
        bytes: [size] uint8; none from the first copy on.
    """

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, dtype=np.uint8)
        self._file: int | None = None
        self._place = slice(0, size)

    @classmethod
    def of_file(cls, path: Path, first: int, size: int) -> Self:
        """`size` bytes of a file from `first` on; copies stay as they are where another file takes its name."""
        found = object.__new__(cls)
        found._file, found._place = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)), slice(first, first + size)
        found.bytes = np.empty(0, dtype=np.uint8)
        return found

    def copy(self) -> CopiedPages:
        """Another one with the same bytes, of which this one has none of its own from now on."""
        clone = object.__new__(CopiedPages)
        clone._file, clone._place = None, slice(0, len(self.bytes))
        if self._file is None and not hasattr(os, "memfd_create"):
            clone.bytes = self.bytes.copy()
            return clone
        if self._file is None:
            made = os.memfd_create("decodery")
            try:
                with open(made, "wb", closefd=False) as file:
                    file.write(self.bytes.data)
            except BaseException:
                os.close(made)
                raise
            self._file, self.bytes = made, np.empty(0, dtype=np.uint8)
        clone.bytes = np.frombuffer(mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)[self._place]
        clone._place = slice(0, len(clone.bytes))
        return clone

    def __del__(self) -> None:
        if (made := getattr(self, "_file", None)) is not None:
            os.close(made)
