"""Devices that are none: tensors that lie elsewhere by name alone, and refuse company as those of a real device do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from decodery.models.batch import Batch, Scores
from decodery.models.protocol import LanguageModel
from decodery.testing.models import Counted

HERE = torch.device("cpu")
_MIXES = ("aten._to_copy", "aten.copy_", "aten.index.Tensor", "aten.index_put")
"""What real devices take tensors of several devices for: copies, and indices that lie on the host."""


class FarTensor(torch.Tensor):
    """A tensor whose numbers lie here, and which says that they lie on another device."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor, device: torch.device) -> FarTensor:
        far: FarTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=device
        )
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return done(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        # PyTorch would make a tensor of a list on a device that is none, whose numbers are lost.
        return super().__getitem__(torch.tensor(index, dtype=torch.int64) if isinstance(index, list) else index)

    def tolist(self) -> Any:
        return self.near.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        raise TypeError(f"can't convert a tensor on {self.device} to numpy: use Tensor.cpu() first")


class Devices(TorchDispatchMode):
    """Within it tensors can be made on devices that are none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return done(func, args, kwargs or {})


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation, which are values and lists of values."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _changed(value: Any, kind: type[torch.Tensor], change: Callable[[Any], torch.Tensor]) -> Any:
    """A value, or a list of values, with its tensors of a kind changed. PyTorch's own takes any tree, and long."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, kind, change) for each in value])
    return value


def done(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation gives, on the device of its operands; raises RuntimeError where these are several."""
    tensors = [*_tensors(args), *_tensors([*kwargs.values()])]
    if any(each.is_meta and not isinstance(each, FarTensor) for each in tensors):
        raise RuntimeError(f"{func}: a tensor was made on a device that is none without a copy, and has no numbers")
    homes = {each.device for each in tensors if each.device != HERE or each.dim() > 0}
    if len(homes) > 1 and not str(func).startswith(_MIXES):
        raise RuntimeError(f"{func}: expected all tensors on one device, found {', '.join(map(str, homes))}")
    asked = kwargs.get("device")
    home = torch.device(asked) if asked is not None else tensors[0].device if tensors else HERE
    if homes and asked is None and home not in homes and not str(func).startswith(_MIXES):
        (home,) = homes
    named = kwargs | ({"device": HERE} if asked else {})
    near = [_changed(each, FarTensor, lambda far: far.near) for each in ([*args], [*named.values()])]
    found = func(*near[0], **dict(zip(named, near[1], strict=True)))
    if func._schema.is_mutable and tensors:
        return args[0] if args else found
    return found if home == HERE else _changed(found, torch.Tensor, lambda each: FarTensor(each, home))


class Watched(Devices):
    """Counts operations on a device that is none, copies to it, and what makes a program wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads = self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func.overloadpacket)
        far = any(isinstance(each, FarTensor) for each in args if isinstance(each, torch.Tensor))
        asked = (kwargs or {}).get("device")
        if name in ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim"):
            self.waits[name] += far
        if name == "aten._to_copy" and asked is not None:
            self.waits["copies out"] += far and torch.device(asked) == HERE
            self._upload(not far and torch.device(asked) != HERE, kwargs)
        if name == "aten.copy_":
            target, source = (isinstance(each, FarTensor) for each in args[:2])
            self.waits["copies out"] += source and not target
            self._upload(target and not source, {"non_blocking": len(args) > 2 and args[2]} | (kwargs or {}))
            far = far and source == target
        if name in ("aten.index", "aten.index_put", "aten.index_put_") and far:
            # Devices copy numbers of rows that lie on the host, and wait for the copy.
            self.waits["indices"] += any(each is not None and not isinstance(each, FarTensor) for each in args[1])
        made = asked is not None and torch.device(asked) != HERE
        self.operations += not func.is_view and (far or made) and name != "aten._to_copy"
        return done(func, args, kwargs or {})

    def _upload(self, made: bool, settings: Any) -> None:
        self.uploads += made
        # The host waits for what it does not say it will not wait for.
        self.waits["copies in"] += made and not (settings or {}).get("non_blocking")


def moved(value: Any, device: str) -> Any:
    """Weights with all their tensors on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return value


class Far(Counted):
    """A model whose scores lie on a device, which may be none."""

    def __init__(self, model: LanguageModel, device: str) -> None:
        super().__init__(model)
        self.device = torch.device(device)

    def forward(self, batch: Batch, **settings: Any) -> Scores:
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            scores = super().forward(batch, **settings)
        if self.device != HERE:
            scores.logits = FarTensor(scores.logits, self.device)
            scores.hidden = {tap: FarTensor(states, self.device) for tap, states in scores.hidden.items()}
        return scores
