"""Streams beside the one that layers read, as in Gemma 3n, for the native pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from decodery.core.native.kernels import address
from decodery.core.native.structs import LinearStruct, StreamLayerStruct, StreamsStruct

from ..config import ModelConfig
from ..torch.mixture import rows_of
from ..torch.weights import Layer, TokenInputs


def stream_matrices(own: TokenInputs, config: ModelConfig) -> list[Any]:
    """The matrix that makes all other streams of the first one, and those that lead each of them back."""
    assert config.alternating is not None and own.stream_out is not None
    width = config.hidden_size
    back = [rows_of(own.stream_out, number * width, width) for number in range(config.alternating.streams - 1)]
    return [own.stream_in, *back]


class AllStreams:
    """How streams begin and end.

    Args:
        matrices: Of `stream_matrices`, in the kernels' layout.
    """

    def __init__(self, config: ModelConfig, matrices: Sequence[LinearStruct]) -> None:
        shape = config.alternating
        assert shape is not None
        self._back = (LinearStruct * (shape.streams - 1))(*matrices[1:])
        self._struct = StreamsStruct(matrices[0], self._back, shape.streams, shape.active)

    @property
    def address(self) -> int:
        """Where the kernels find them."""
        return ctypes.addressof(self._struct)


class LayerStreams:
    """What one layer predicts and corrects streams by, and what it adds beside attention.

    Args:
        into, out: Of what is added, in the kernels' layout.
    """

    def __init__(self, layer: Layer, config: ModelConfig, into: LinearStruct, out: LinearStruct) -> None:
        shape, hidden = config.alternating, config.hidden_size
        assert shape is not None
        count = shape.streams
        self._struct = StreamLayerStruct(into, out)
        self._alive: list[torch.Tensor] = []
        parts: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
            "out_norm": (layer.laurel_norm, (hidden,)),
            "norm": (layer.stream_norm, (hidden,)),
            "router": (layer.stream_router, (count, hidden)),
            "predict": (layer.stream_predict, (count * count, count)),
            "correct": (layer.stream_correct, (count, count)),
        }
        if shape.scaled:
            parts["scale"] = (layer.stream_scale, (hidden,))
        for name, (part, size) in parts.items():
            assert part is not None
            self._alive.append(part.detach().to(torch.float32).contiguous())
            setattr(self._struct, name, address(self._alive[-1], torch.float32, *size))

    @property
    def address(self) -> int:
        """Where the kernels find it."""
        return ctypes.addressof(self._struct)
