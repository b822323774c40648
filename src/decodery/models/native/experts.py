"""Experts of a layer as the native pass reads them: laid out when a row first takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch

from decodery.core.mapped_memory import forget
from decodery.core.native.kernels import address
from decodery.core.native.structs import ExpertsStruct, LinearStruct

from ..config import ModelConfig
from ..loaders.in_place import InPlace
from ..torch.mixture import nothing, rows_of
from .packed import Arena, Packed, packed_size

if TYPE_CHECKING:
    from ..torch.weights import Layer, Linear

MOST_GROUPS, MOST_BEST = 256, 16
"""As in csrc/state.h."""


class Experts:
    """The experts of one layer, each of which is copied from the file when a row first takes it.

    Args:
        files: Where weights are mapped, see `mapped_files`.
    """

    def __init__(self, layer: Layer, config: ModelConfig, files: list[tuple[int, int]]) -> None:
        assert layer.router is not None
        self._files = files
        self._parts: dict[str, tuple[Linear, int]] = {
            "gate_up": (layer.gate_up, (2 if config.gated else 1) * config.intermediate_size),
            "down": (layer.down, config.hidden_size),
        }
        self._structs, room = {}, 0
        for name, (stacked, count) in self._parts.items():
            first = rows_of(stacked, 0, count)
            outputs, inputs = first.shape  # type: ignore[attr-defined]
            empty = LinearStruct(None, None, None, inputs, outputs, first.form)  # type: ignore[attr-defined]
            self._structs[name] = (LinearStruct * config.experts)(*[empty] * config.experts)
            room += -(-packed_size(first) // 64) * 64  # type: ignore[arg-type]
        # The system gives memory when it is first written to: experts that no row takes need none.
        self._arena = Arena(config.experts * room)
        self._lock = Lock()
        self._packed: dict[tuple[str, int], Packed] = {}
        self._missing = set(range(config.experts))
        whole = {
            "router": layer.router, "router_bias": layer.router_bias, "choice_bias": layer.choice_bias,
            "scales": layer.expert_scales, "share": layer.shared_router,
        }  # fmt: skip
        if layer.router_scale is not None:
            router_norm = layer.router_scale.detach().float() * config.hidden_size**-0.5
            whole |= {
                "router_norm": router_norm, "enter_norm": layer.experts_norm, "leave_norm": layer.post_experts_norm,
                "mlp_leave_norm": layer.post_shared_norm,
            }  # fmt: skip
        floats = {
            name: each.detach().to(torch.float32).contiguous() for name, each in whole.items() if each is not None
        }
        self._alive = floats
        struct = self._struct = ExpertsStruct()
        for name, each in floats.items():
            of_hidden = {"router": (config.experts, config.hidden_size), "share": (1, config.hidden_size)}
            shape = (config.hidden_size,) if name.endswith("norm") else of_hidden.get(name, (config.experts,))
            setattr(struct, name, address(each, torch.float32, *shape))
        struct.gate_up, struct.down = self._structs["gate_up"], self._structs["down"]
        struct.count, struct.taken = config.experts, config.experts_per_token
        struct.groups, struct.taken_groups = config.expert_groups, config.taken_groups
        struct.group_best = config.group_best
        struct.sigmoid, struct.normed = int(config.sigmoid_router), int(config.normed_experts)
        struct.scaled_inputs = int(config.scaled_inputs)
        struct.nothing, struct.scale = nothing(config), config.experts_scale

    @property
    def address(self) -> int:
        """Where the kernels find them."""
        return ctypes.addressof(self._struct)

    @property
    def whole(self) -> bool:
        """Whether all are laid out."""
        return not self._missing

    @property
    def laid_out(self) -> set[int]:
        """Numbers of the experts that are laid out."""
        return set(range(self._struct.count)) - self._missing

    def lay_out(self, numbers: Iterable[int]) -> None:
        """Have these in the kernels' layout."""
        with self._lock:
            for number in self._missing.intersection(numbers):
                # Passes of other threads take an expert from the moment on that its gates have weights.
                for name in ("down", "gate_up"):
                    stacked, count = self._parts[name]
                    linear = rows_of(stacked, number * count, count)
                    packed = self._packed[name, number] = Packed(linear, self._arena)  # type: ignore[arg-type]
                    struct = self._structs[name][number]
                    struct.scale, struct.bias = packed.struct.scale, packed.struct.bias
                    struct.weight = packed.struct.weight
                    if not isinstance(linear, InPlace):
                        for tensor in linear.tensors().values():  # type: ignore[attr-defined]
                            forget(tensor, self._files)
                self._missing.discard(number)


def distinct(taken: np.ndarray) -> int:
    """How many different experts [layers, n] has, of all layers together."""
    ordered = np.sort(taken, axis=1)
    return ordered[:, :1].size + int((ordered[:, 1:] != ordered[:, :-1]).sum())
