"""Models whose passes are opened: in float64, and in int8 on the native kernels and in PyTorch alone."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from decodery.models.config import Rope
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Layer
from decodery.testing import tiny_transformer, to_int8

BACKENDS = ("float64", "native", "portable")
LAYERS = 4


def make(backend: str, *, gemma: bool = False) -> Transformer:
    """A model of `LAYERS` layers, with windows, two rotations and norms after the sublayers if `gemma`."""
    base = tiny_transformer(3, num_layers=LAYERS)
    if gemma:
        random = torch.Generator().manual_seed(5)

        def norm(n: int) -> torch.Tensor:
            return 1.0 + 0.2 * torch.randn(n, generator=random, dtype=torch.float64)

        config = replace(
            base.config, qk_norm=True, sandwich_norms=True, activation="gelu_tanh", sliding_window=5,
            sliding_layers=(True, False, True, False), rope=Rope(theta=1e6), local_rope=Rope(theta=1e4),
        )  # fmt: skip
        hidden, dim = config.hidden_size, config.head_dim
        layers: list[Layer] = [
            replace(
                layer, q_norm=norm(dim), k_norm=norm(dim), post_attention_norm=norm(hidden), post_mlp_norm=norm(hidden)
            )
            for layer in base.weights.layers
        ]
        base = Transformer(config, replace(base.weights, layers=layers))
    if backend == "float64":
        return base
    return without_kernels(base) if backend == "portable" else to_int8(base)


def without_kernels(base: Transformer) -> Transformer:
    """With int8 weights, as where the kernels were not built."""
    with mock.patch("decodery.models.torch.transformer.runs_natively", lambda config: False):
        return to_int8(base)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal: to the bit where the model's rows are exact, to rounding in float64."""
    return torch.equal(left, right) if left.dtype == torch.float32 else torch.allclose(left, right, atol=1e-11, rtol=0)
