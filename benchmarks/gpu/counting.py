"""What the device can do, and what one step of decoding asks of it: kernels, waits, copies, and calls of Python."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
_GRAPHS = ("cudaGraphLaunch",)
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_COPIES = ("cudaMemcpyAsync", "cudaMemcpy")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, body: Callable[[], Any], times: int, warm: int = 2) -> float:
    """Median seconds of a call and of what it asks of the device."""
    taken = []
    for number in range(warm + times):
        synchronize(device)
        begin = perf_counter()
        body()
        synchronize(device)
        if number >= warm:
            taken.append(perf_counter() - begin)
    return median(taken)


def copy_bandwidth(device: torch.device, mebibytes: int) -> float:
    """GB/s (1e9 bytes read and written per second) of a copy within the device's memory."""
    source = torch.rand(mebibytes << 18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(device, lambda: target.copy_(source), 20) / 1e9


def product_rate(device: torch.device, size: int) -> float:
    """TFLOP/s (1e12 operations per second) of a product of random square matrices in bfloat16."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timed(device, lambda: left @ right, 10) / 1e12


def counted(device: torch.device, step: Callable[[], Any], steps: int) -> dict[str, float]:
    """What a step does on average, by `torch.profiler`, and the calls of Python functions in it.

    Args:
        device: Where the model is.
        step: One step; it must not be the first of its kind.
        steps: How many are watched.

    Returns:
        Per step: kernels that ran on the device, launches of single kernels and of graphs, waits for the device,
        copies, operators of PyTorch, calls of Python functions; milliseconds the kernels took, and of a step that
        nobody watches.
    """
    step_ms = 1e3 * timed(device, step, steps)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        synchronize(device)
    names: Counter[str] = Counter()
    kernels, busy = 0, 0.0
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            kernels += not event.name.startswith(("Memcpy", "Memset"))
            busy += event.time_range.elapsed_us() / 1e3
        else:
            names[event.name] += 1

    def per_step(known: tuple[str, ...]) -> float:
        return sum(count for name, count in names.items() if name.startswith(known)) / steps

    return {
        "step_ms": round(step_ms, 4),
        "kernels": kernels / steps,
        "kernel_ms": round(busy / steps, 4),
        "launches": per_step(_LAUNCHES),
        "graphs": per_step(_GRAPHS),
        "waits": per_step(_WAITS),
        "copies": per_step(_COPIES),
        "operators": per_step(("aten::",)),
        "python_calls": python_calls(step, steps),
    }


def python_calls(step: Callable[[], Any], steps: int) -> float:
    """Calls of Python functions in a step, on average."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(before)
    return calls / steps
