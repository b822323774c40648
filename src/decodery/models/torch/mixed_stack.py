"""All layers of a mixture of experts: attention in native calls, experts on the kernels for matrices."""

from __future__ import annotations

import torch

from ..batch import Batch
from ..config import ModelConfig
from ..hooks import HookPoint, Hooks
from ..layer_plan import LayerStep
from ..native.stack import NativeStack
from .portable import Angles, PortableStack
from .weights import Weights

_WITHIN = ("head_out", "attn_out")
"""Hook points that native calls of one sublayer do not come by."""


class MixedStack(PortableStack):
    """The results of `PortableStack`, whose experts each pass reads as far as its rows take them."""

    def __init__(self, config: ModelConfig, weights: Weights, angles: Angles) -> None:
        super().__init__(config, weights, angles)
        self._native = NativeStack(config, weights, angles, mlps=False)

    def attended(self, layer: int, hidden: torch.Tensor, batch: Batch, hooks: Hooks) -> torch.Tensor:
        """See `PortableStack.attended`."""
        if any(HookPoint(name, layer) in hooks for name in _WITHIN):
            return super().attended(layer, hidden, batch, hooks)
        return self._native.layers(hidden, batch, [LayerStep(layer, mlp=False)], Hooks.reading(()))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `native.NativeStack.head`."""
        return self._native.head(hidden)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `native.NativeStack.final_norm`."""
        return self._native.final_norm(hidden)

    def project(self, normed: torch.Tensor) -> torch.Tensor:
        """See `native.NativeStack.project`."""
        return self._native.project(normed.float())
