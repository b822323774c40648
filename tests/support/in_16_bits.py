"""Tiny models whose passes round no activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Weights


def in_16_bits(model: Transformer) -> Transformer:
    """The same model with weights in bfloat16, which multiply floats: no small difference is rounded to a large one."""

    def converted(linear: Any) -> Dense:
        return Dense(linear.weight.bfloat16(), linear.bias)

    old, names = model.weights, ("qkv", "output", "gate_up", "down")
    layers = [
        replace(layer, **{name: converted(getattr(layer, name)) for name in names})  # type: ignore[arg-type]
        for layer in old.layers
    ]
    return Transformer(model.config, Weights(old.embedding, layers, old.norm, converted(old.head)))
