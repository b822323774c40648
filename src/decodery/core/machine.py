"""Which machine this is: what a measurement made here depends on."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_X86 = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve")
"""Those that decide which kernels can run, by the names Linux gives them."""


def describe() -> dict[str, Any]:
    """Processor, memory (GiB), threads, system, versions and kernels, as plain data."""
    import torch

    from decodery.core.version import __version__

    from .native import kernels

    name, instructions = processor()
    memory = physical_memory()
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": instructions,
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "decodery": __version__,
        "kernels": kernels.status(),
    }


@cache
def processor() -> tuple[str, list[str]]:
    """Name and notable instruction sets; from the system's own list where there is one."""
    listing = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    flags = (fields.get("flags") or fields.get("features") or "").split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in _X86 + _ARM if flag in flags]


@cache
def physical_memory() -> int | None:
    """Bytes of memory that this machine has, None where the system does not tell."""
    if sys.platform == "win32":
        # MEMORYSTATUSEX: its own length in four bytes, four of load, then what there is in eight.
        status = (ctypes.c_uint64 * 8)(64)
        found = ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
        return int(status[1]) if found else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@cache
def usable_memory() -> int | None:
    """Bytes of memory that this process may use, in a container its limit; None where unknown."""
    found = [*_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    if (machine := physical_memory()) is not None:
        found.append(machine)
    return min(found, default=None)


@cache
def largest_memory() -> int | None:
    """Bytes of the memory that this process may use, or of the largest graphics card, whichever is more."""
    usable = usable_memory()
    return None if usable is None else max(usable, *cards(), 0)


@cache
def cards() -> tuple[int, ...]:
    """Bytes of memory of each graphics card."""
    import torch

    return tuple(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def _limits(own: Path, root: Path) -> Iterator[int]:
    """Limits on the memory of a process's control groups and of those above.

    Args:
        own: Lists the groups of the process.
        root: Where groups of version 2 lie, and in `memory` those of version 1.
    """
    try:
        groups = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, kinds, path in groups:
        if kinds and "memory" not in kinds.split(","):
            continue
        folder, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            try:
                said = folder.joinpath(*parts[:depth], name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if said.isdecimal():
                yield int(said)
