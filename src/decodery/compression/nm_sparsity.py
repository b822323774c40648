"""N weights of every M consecutive ones stay, the others become zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import register
from decodery.models.torch.weights import Dense

from .base import Size
from .each_linear import EachLinear, Made


@register(
    "nm-sparsity",
    paper="A Simple and Effective Pruning Approach for Large Language Models (2023)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class NMSparsity(EachLinear):
    """Keeps the n strongest weights of every m consecutive inputs and zeroes the others, untrained.

    The weights stay in floating point, zeros written out, and the report says what n values and their places would
    need; no kernel here skips the zeros, so nothing becomes faster.

    Attributes:
        n: Weights that are kept of every m.
        m: Inputs of a group.
        by: What makes a weight strong, its "magnitude", or its magnitude times the norm of what its input is given
            ("activation", which reads a text). n = m keeps all.
    """

    n: int = 2
    m: int = 4
    by: Literal["magnitude", "activation"] = "magnitude"

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m <= 64:
            raise SettingsError(f"nm-sparsity keeps n of m with 1 <= n <= m <= 64, not {self.n} of {self.m}")

    @property
    def reads(self) -> bool:
        return self.by == "activation"

    @property
    def whole_numbers(self) -> bool:
        return False

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        strength = whole.weight.abs()
        if self.by == "activation":
            assert gram is not None
            strength = strength * gram.diagonal().sqrt().to(strength.dtype)
        return sparse(whole, strongest(strength, self.n, self.m), self.n, self.m, itemsize)


def strongest(strength: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """[out, in] bool: the n strongest of every m consecutive inputs, the first among equals.

    Raises:
        UnsupportedModel: If m does not divide the inputs.
    """
    outputs, inputs = strength.shape
    if inputs % m:
        raise UnsupportedModel(f"groups of {m} do not divide the {inputs} inputs of a layer: choose another m")
    order = strength.view(outputs, -1, m).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros(order.shape, dtype=torch.bool, device=order.device).scatter_(-1, order[..., :n], True)
    return kept.view(outputs, inputs)


def sparse(whole: Dense, kept: torch.Tensor, n: int, m: int, itemsize: int) -> Made:
    """A linear layer with zeros but where `kept` [out, in] bool says, n of m.

    Args:
        itemsize: Bytes of a value in a file.
    """
    outputs, inputs = whole.shape
    count = outputs * inputs * n // m
    places = 0 if n == m else math.ceil(math.log2(m)) / 8
    return Made(Dense(torch.where(kept, whole.weight, 0.0), whole.bias), Size(count * (itemsize + places), count))
