"""Parts of the target that a head begins its training with."""

from __future__ import annotations

import torch

from ...model.transformer import Transformer
from ...model.weights import copied, floating
from .parts import LayerShape


def copied_layer(model: Transformer, index: int, *, silent: bool = False) -> tuple[LayerShape, dict[str, torch.Tensor]]:
    """The shape of a target's layer, its matrices and norm before the MLP as "layer.NAME.weight", and its biases.

    silent: the copy adds nothing to the stream yet.
    """
    config, layer = model.config, model.weights.layers[index]
    shape = LayerShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.layer_rope(index).theta,
        config.norm_eps,
    )
    tensors = {"layer.mlp_norm.weight": copied(layer.mlp_norm)}
    for name in ("qkv", "output", "gate_up", "down"):
        linear = floating(getattr(layer, name))
        parts = {"weight": linear.weight} if linear.bias is None else {"weight": linear.weight, "bias": linear.bias}
        quiet = silent and name in ("output", "down")
        for part, each in parts.items():
            tensors[f"layer.{name}.{part}"] = torch.zeros_like(each) if quiet else each
    return shape, tensors
