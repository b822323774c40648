"""What layers of Gemma 4 add because of a row's token, as the native pass reads it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from decodery.core.native.kernels import address
from decodery.core.native.structs import LinearStruct, TokenInputsStruct

from ..config import ModelConfig

if TYPE_CHECKING:
    from ..torch.weights import Layer


class LayerInputs:
    """The two matrices and the norm of one layer.

    Args:
        gate, out: In the kernels' layout.
    """

    def __init__(self, layer: Layer, index: int, config: ModelConfig, gate: LinearStruct, out: LinearStruct) -> None:
        assert layer.input_norm is not None
        self._norm = layer.input_norm.detach().to(torch.float32).contiguous()
        width = config.layer_inputs
        norm = address(self._norm, torch.float32, config.hidden_size)
        self._struct = TokenInputsStruct(gate, out, norm, index * width, config.num_layers * width)

    @property
    def address(self) -> int:
        """Where the kernels find them."""
        return ctypes.addressof(self._struct)
