"""Parts of the target that a head begins its training with."""

from __future__ import annotations

import torch

from ...model.transformer import Transformer
from ...model.weights import copied, floating
from .parts import LayerShape


def copied_layer(model: Transformer, index: int) -> tuple[LayerShape, dict[str, torch.Tensor]]:
    """The shape of a target's layer, and its matrices and norm before the MLP as "layer.NAME.weight"."""
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
    tensors = {
        f"layer.{name}.weight": floating(getattr(layer, name)).weight for name in ("qkv", "output", "gate_up", "down")
    }
    tensors["layer.mlp_norm.weight"] = copied(layer.mlp_norm)
    return shape, tensors
