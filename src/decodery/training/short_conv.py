"""Give a model dynamic short convolutions: new ones change nothing, and only they are trained."""

from __future__ import annotations

from dataclasses import replace

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.config import ShortConv
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense

from .tensors import even

PARTS = ("short_in", "short_out", "short_static")


def with_short_convolutions(model: Transformer, shape: ShortConv, seed: int = 0) -> Transformer:
    """The model with a convolution on queries, keys and values of every layer, whose filters are zero.

    Its logits are the model's own to the bit until they are trained. The model stays as it is, and shares its weights.

    Raises:
        UnsupportedModel: For layers in int8 or int4, or without queries, keys and values.
    """
    config = model.config
    if config.keeps_order or config.latent is not None or not isinstance(model.weights.layers[0].qkv, Dense):
        raise UnsupportedModel(
            "convolutions need a model in floating point with queries, keys and values in every layer: load it with "
            "dtype='float32'"
        )
    if shape.kernel < 1 or shape.rank < 1:
        raise SettingsError(f"convolutions need a kernel and a rank of at least 1, not {shape.kernel}, {shape.rank}")
    chance = torch.Generator().manual_seed(seed)
    hidden, width = config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    like = torch.empty(0, dtype=model.weights.dtype, device=model.device)
    layers = []
    for layer in model.weights.layers:
        # As linear layers begin, so that the first step of the outputs already knows rows apart.
        first = (2 * even(chance, 3 * shape.rank, hidden) - 1) * hidden**-0.5
        zeros = [like.new_zeros(rows, width) for rows in (shape.rank * shape.kernel, shape.kernel)]
        layers.append(replace(layer, **dict(zip(PARTS, (first.to(like), *zeros), strict=True))))
    return Transformer(replace(config, short_conv=shape), replace(model.weights, layers=layers))


def parameters(model: Transformer) -> dict[str, torch.Tensor]:
    """What is to be trained, by name, the same objects."""
    return {
        f"{index}.{name}": getattr(layer, name) for index, layer in enumerate(model.weights.layers) for name in PARTS
    }
