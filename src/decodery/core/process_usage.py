"""What a process has taken: processor time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def processor_seconds(process: subprocess.Popen[bytes]) -> float | None:
    """Seconds that a process has worked so far; None where that cannot be told."""
    try:
        # After the name, which may hold anything, the 12th and 13th fields are its ticks and the kernel's for it.
        fields = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def resident(process: subprocess.Popen[bytes]) -> int:
    """Bytes of memory that a process holds; 0 where that cannot be told."""
    if sys.platform == "win32":
        import ctypes

        class Counters(ctypes.Structure):
            _fields_ = (
                ("cb", ctypes.c_uint32),
                ("faults", ctypes.c_uint32),
                *((name, ctypes.c_size_t) for name in ("peak", "now", "a", "b", "c", "d", "committed", "most")),
            )

        counters = Counters(cb=ctypes.sizeof(Counters))
        handle = ctypes.c_void_p(int(process._handle))
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(handle, ctypes.byref(counters), counters.cb)
        return int(counters.committed)
    try:
        found = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid)], capture_output=True, timeout=5)
        return int(found.stdout) << 10
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0
