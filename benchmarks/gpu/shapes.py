"""The models that the kit runs: the embedded one, random ones of known shapes made on the device, and tiny ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch

from decodery.models.cache import page_pool
from decodery.models.config import ModelConfig, Rope
from decodery.models.cuda.graphs import StaticPasses
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights
from decodery.testing import tiny_transformer


@contextmanager
def pools_of_pytorch() -> Iterator[None]:
    """Within it texts on the CPU keep their pages as on other devices, so that their passes have fixed shapes too."""
    kept = page_pool.library, page_pool._pools
    page_pool.library, page_pool._pools = lambda: None, WeakValueDictionary()  # type: ignore[assignment]
    try:
        yield
    finally:
        page_pool.library, page_pool._pools = kept


@dataclass(frozen=True)
class Shape:
    """A Llama-style model. tied: whether the head is the embedding."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    context: int = 8192


SHAPES = {
    "SmolLM2-135M": Shape(576, 1536, 30, 9, 3, 49_152, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, True),
    "8B": Shape(4096, 14_336, 32, 32, 8, 128_256, False),
}
"""The embedded model's, and those of Qwen2.5-1.5B and Llama 3 8B, without their biases."""
TINY = {
    "SmolLM2-135M": Shape(48, 64, 2, 3, 1, 160, True, 512),
    "1.5B": Shape(64, 96, 2, 4, 2, 192, True, 512),
    "8B": Shape(64, 96, 3, 4, 2, 192, False, 512),
}
"""The same kinds, in seconds on a CPU."""


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Transformer:
    """A model of this shape with weights drawn on the device. What it writes means nothing."""
    draws = torch.Generator(device=device).manual_seed(seed)
    dim = shape.hidden // shape.heads

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.empty(rows, columns, dtype=dtype, device=device)
        return drawn.normal_(0.0, gain / columns**0.5, generator=draws)

    ones = torch.ones(shape.hidden, dtype=dtype, device=device)
    layers = [
        Layer(
            attention_norm=ones,
            qkv=Dense(matrix((shape.heads + 2 * shape.kv_heads) * dim, shape.hidden)),
            output=Dense(matrix(shape.hidden, shape.heads * dim)),
            mlp_norm=ones,
            gate_up=Dense(matrix(2 * shape.inner, shape.hidden)),
            down=Dense(matrix(shape.hidden, shape.inner)),
        )
        for _ in range(shape.layers)
    ]
    embedding = matrix(shape.vocab, shape.hidden, shape.hidden**0.5)
    head = Dense(embedding if shape.tied else matrix(shape.vocab, shape.hidden))
    config = ModelConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=dim,
        max_positions=shape.context,
        tie_embeddings=shape.tied,
        rope=Rope(theta=1e6),
    )
    return with_static(Transformer(config, Weights(embedding, layers, ones, head)))


def with_static(model: Transformer) -> Transformer:
    """The model, whose small passes run at fixed shapes: as graphs on CUDA, elsewhere as the same function without.

    Off CUDA it gives up the processor's own kernels, so that all passes are those of a GPU, in the weights' precision.
    """
    if model.static is None and model.config.static_shapes:
        model.static = StaticPasses()
        model.pages_together = True
        _torch_alone(model)
    return model


def _torch_alone(model: Transformer) -> None:
    model._stack = None
    model.dtype = model.cache_dtype = model.weights.dtype


def without_static(model: Transformer) -> Transformer:
    """The same weights, all of whose passes are ordinary ones."""
    clone = Transformer(model.config, model.weights)
    clone.static = None
    _torch_alone(clone)
    return clone


@cache
def tiny(device: torch.device, dtype: torch.dtype = torch.float64, layers: int = 2) -> Transformer:
    """The tiny model of the invariants on a device, the same numbers on each; one for all checks, with its graphs."""
    base = tiny_transformer(0, num_layers=layers, max_positions=1024)
    return moved(base, device, dtype)


def moved(model: Transformer, device: torch.device, dtype: torch.dtype | None = None) -> Transformer:
    """A model's twin on a device; `dtype` is that of its floating-point tensors, None to leave it."""
    return with_static(Transformer(model.config, _moved(model.weights, device, dtype)))


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, list):
        return [_moved(item, device, dtype) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{each.name: _moved(getattr(value, each.name), device, dtype) for each in fields(value) if each.init},
        )
    return value
