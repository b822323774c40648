"""Whether Triton's kernels can be launched on a device, which takes more than that it is installed."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch


@cache
def launches(device: torch.device) -> bool:
    """Whether kernels can be launched on a CUDA device.

    Where they cannot, a warning says once why passes are slower.

    Args:
        device: The device.
    """
    if find_spec("triton") is None:
        why = "Triton is not installed (pip install triton)"
    else:
        try:
            # The first launch builds what launches: with a C compiler, and against Python's headers.
            from .fused_kernel import gate

            gate(torch.zeros(1, 2, dtype=torch.float32, device=device), "silu")
            return True
        except Exception as error:
            said = (str(error).splitlines() or [""])[0][:200]
            why = f"Triton launches no kernel, which takes a C compiler and Python's headers ({said})"
    warnings.warn(f"passes on {device} take PyTorch's operations, which are several times slower: {why}", stacklevel=2)
    return False
