"""Tensors that trainings begin with and learn from, on the processor, and the small networks some of them are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch


def zeros(*shape: int) -> torch.Tensor:
    """Zeros in float32."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def normal(draws: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers of the standard normal distribution, in float32."""
    return torch.randn(shape, generator=draws, dtype=torch.float32, device="cpu")


def even(draws: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers from 0 to 1, in float32."""
    return torch.rand(shape, generator=draws, dtype=torch.float32, device="cpu")


def int_tensor(values: Sequence[Any]) -> torch.Tensor:
    """Integers in int64."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def bool_tensor(values: Sequence[Any]) -> torch.Tensor:
    """Whether each holds."""
    return torch.tensor(values, dtype=torch.bool, device="cpu")


def float_tensor(values: Sequence[Any]) -> torch.Tensor:
    """Numbers in float32."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def mlp(sizes: Sequence[int], draws: torch.Generator, last: float) -> dict[str, torch.Tensor]:
    """The tensors of a network with `relu` between its layers, "weight.N" and "bias.N".

    Args:
        sizes: Its widths, from the input to the output.
        draws: What its weights are drawn by.
        last: What those of the last layer are multiplied by.
    """
    tensors = {}
    for number, (into, width) in enumerate(pairwise(sizes)):
        scale = last if number == len(sizes) - 2 else 1.0
        tensors[f"weight.{number}"] = normal(draws, width, into) * (2 / into) ** 0.5 * scale
        tensors[f"bias.{number}"] = zeros(width)
    return tensors


def through(tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """What a network of `mlp` makes of rows."""
    layers = sum(name.startswith("weight.") for name in tensors)
    for number in range(layers):
        rows = rows @ tensors[f"weight.{number}"].T + tensors[f"bias.{number}"]
        rows = rows.relu() if number < layers - 1 else rows
    return rows
