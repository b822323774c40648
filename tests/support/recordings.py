"""What a graph is on a CUDA device, made of PyTorch's operations: recorded once, done again with other inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decodery.models.cuda.captured import Captured
from decodery.speculative.heads.fixed_shapes import HeadPasses
from decodery.speculative.heads.layered import LayeredHead
from far import FarTensor

WAITS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)


class Recording(TorchDispatchMode):
    """What a graph is on a CUDA device: the operations of one call, done again with the tensors of that call."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITS, f"{func} needs what the device has not computed yet"
        found = func(*args, **kwargs or {})
        self._done.append((func, args, kwargs or {}, tree_leaves(found)))
        return found

    def replay(self) -> None:
        for func, args, kwargs, before in self._done:
            for old, new in zip(before, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and _address(old) != _address(new):
                    old.copy_(new)


def _address(tensor: torch.Tensor) -> int:
    return (tensor.near if isinstance(tensor, FarTensor) else tensor).data_ptr()


def heads_at_fixed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on heads run at fixed shapes wherever they are."""
    fixed = cached_property(lambda head: HeadPasses())
    fixed.__set_name__(LayeredHead, "fixed")
    monkeypatch.setattr(LayeredHead, "fixed", fixed)


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on passes at fixed shapes are recorded and replayed; returns their shapes, a list that grows."""
    recorded: list[Any] = []

    def replay(self: Captured[Any], run: Callable[[], Any]) -> Any:
        if self.capture is None:
            recorded.append(self.shape)
            with Recording() as made:
                self.result = run()
            self.capture = made
        self.capture.replay()
        return self.result

    monkeypatch.setattr(Captured, "replay", replay)
    return recorded
