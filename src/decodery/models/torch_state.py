"""What a program has set for PyTorch around a call, and must not change what is computed in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def in_plain_state(call: Callable[P, T]) -> Callable[P, T]:
    """Let a function run without gradients, inference mode and autocast, whatever its caller is in.

    Tensors made in inference mode could not be written to by a later call outside of it, and autocast would round what
    is computed in float32. Default dtype, default device and threads need nothing here: allocations and kernels do not
    depend on them.

    Args:
        call: the function.

    Returns:
        The function, for the same arguments.
    """

    @wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return call(*args, **kwargs)

    return plain
