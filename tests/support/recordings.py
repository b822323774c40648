"""What a graph is on a CUDA device, made of PyTorch's operations: recorded once, done again with other inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decodery.models.cuda.static_pass import Shape, StaticPass
from decodery.models.torch.transformer import Transformer

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
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """From now on static passes are recorded and replayed; returns the shapes that have been, a list that grows."""
    recorded: list[Shape] = []

    def replay(self: StaticPass, model: Transformer) -> Any:
        if self._capture is None:
            recorded.append(self.shape)
            with Recording() as made:
                self._result = self.run(model)
            self._capture = made
        self._capture.replay()
        return self._result

    monkeypatch.setattr(StaticPass, "replay", replay)
    return recorded
