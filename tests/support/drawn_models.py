"""Models with random weights of any configuration, without a checkpoint, and their texts as trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from decodery.models.batch import Batch, Segment
from decodery.models.config import ModelConfig
from decodery.models.loaders.fused_slots import Slot, slots
from decodery.models.native.int8 import Int8Linear
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Weights
from tiny_models import tree_mask

PARENTS = [-1, 0, 0, 1, 1, 2, 5, 6]
Draw = Callable[[tuple[int, ...], torch.Generator], Any]


def int8(shape: tuple[int, ...], rng: torch.Generator) -> Int8Linear:
    drawn = torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")
    return Int8Linear((40 * drawn).clamp(-127, 127).to(torch.int8), torch.full(shape[:1], 0.004, device="cpu"))


def made(config: ModelConfig, linear: Draw = int8, dtype: torch.dtype = torch.float32) -> Transformer:
    rng = torch.Generator().manual_seed(1)

    def tensor(slot: Slot) -> Any:
        if slot.linear:
            return linear(slot.shape, rng)
        drawn = torch.randn(slot.shape, generator=rng, dtype=torch.float32, device="cpu")
        return (drawn.abs() if slot.name.endswith("norm.weight") else 0.3 * drawn).to(dtype)

    # As `fused.read` leaves what a layer has not.
    empty = torch.zeros(0, dtype=torch.float32, device="cpu")
    absent = dict.fromkeys(("attention_norm", "mlp_norm"), empty)
    absent |= dict.fromkeys(("qkv", "output", "gate_up", "down"), Dense(empty[None]))
    parts: list[dict[str, Any]] = [dict(absent) for _ in range(config.num_layers)]
    whole: dict[str, Any] = {}
    for slot in slots(config):
        of = slot.name.split(".")
        holder = whole if of[0] != "layers" else parts[int(of[1])]
        if of[-1] == "bias":
            holder[of[-2]].bias = tensor(slot)
        else:
            holder[of[-2]] = tensor(slot)
    return Transformer(config, Weights(layers=[Layer(**each) for each in parts], **whole))


def after(model: Transformer, *chunks: int) -> Any:
    """A cache whose text was read in chunks of so many tokens."""
    cache, done = model.new_cache(), 0
    for size in chunks:
        ids = np.arange(done, done + size) * 7 % 90
        model.forward(Batch([Segment(np.arange(done, done + size), tokens=ids, cache=cache)]))
        cache.keep(range(size))
        done += size
    return cache


def tree_logits(model: Transformer, cache: Any, parents: list[int], tokens: list[int]) -> torch.Tensor:
    mask = tree_mask(parents)
    positions = cache.next_position + mask.sum(axis=1) - 1
    found = model.forward(Batch([Segment(positions, tokens=np.asarray(tokens), mask=mask, cache=cache)])).logits
    cache.truncate(cache.next_position)
    return found
