"""Parts of the target that a head begins its training with."""

from __future__ import annotations

import torch

from decodery.core.errors import UnsupportedModel
from decodery.models.config import ModelConfig
from decodery.models.torch.rope import rope_frequencies
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import copied, floating

from .parts import LayerShape


def layer_shape(config: ModelConfig, index: int) -> LayerShape:
    """The shape of layer `index`, with its rotary positions; a factor that yarn puts on them is left out."""
    rope = config.layer_rope(index)
    stretch: tuple[float, ...] = ()
    if rope.kind != "default":
        turned = rope.rotated or config.head_dim
        exponents = torch.arange(0, turned, 2, dtype=torch.float64, device="cpu") / turned
        inverse, _ = rope_frequencies(rope, turned)
        stretch = tuple((1.0 / rope.theta**exponents / inverse.double()).tolist())
    return LayerShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        rope.theta,
        config.norm_eps,
        stretch=stretch,
        rotated=rope.rotated,
    )


def copied_layer(model: Transformer, index: int, *, silent: bool = False) -> tuple[LayerShape, dict[str, torch.Tensor]]:
    """The shape of a target's layer, its matrices and norm before the MLP, and its biases.

    Tensors are named "layer.NAME.weight".

    Args:
        silent: The copy adds nothing to the stream yet.
    """
    layer = model.weights.layers[index]
    if layer.router is not None:
        raise UnsupportedModel("a head begins as a layer of its model, and this one's have many experts: use another")
    if model.config.layer_rope(index).rotated:
        # Their rows are in an order of this package's own.
        raise UnsupportedModel("a head begins as a layer of its model, and this one turns some dimensions: use another")
    if not model.config.usual:
        raise UnsupportedModel(
            f"a head begins as a layer of its model, and those of {model.config.family} are built in another way: "
            "draft with what needs no head, such as auto"
        )
    tensors = {"layer.mlp_norm.weight": copied(layer.mlp_norm)}
    for name in ("qkv", "output", "gate_up", "down"):
        linear = floating(getattr(layer, name))
        parts = {"weight": linear.weight} if linear.bias is None else {"weight": linear.weight, "bias": linear.bias}
        quiet = silent and name in ("output", "down")
        for part, each in parts.items():
            tensors[f"layer.{name}.{part}"] = torch.zeros_like(each) if quiet else each
    return layer_shape(model.config, index), tensors
