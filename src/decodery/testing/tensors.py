"""The memory of living tensors, counted at their allocation and release."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """A context that counts the memory of every new tensor until it is released.

    Memory of native code and numpy is not counted.

    Args:
        counts: Decides which tensors count, by default all; views of counted memory add nothing.

    Attributes:
        now: Current bytes.
        peak: Maximum of `now`.
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._counts = counts
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of older memory, such as weights, adds nothing.
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self._see(each)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size or not self._counts(tensor):
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
