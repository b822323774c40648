"""How many bytes of tensors are alive, counted by the tensors themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """A context in which the memory of every new tensor is counted until it is given back.

    What native code and numpy take for themselves is not seen.

    Args:
        counts: Which tensors count, by default all; views of counted memory add nothing.
        now, peak: Bytes.
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._counts = counts
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of what was there before, weights say, is nothing new.
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
