"""Linear layers that round what they read to a few numbers: inputs of 4 bits in floating point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

LEVELS = 8
"""Magnitudes that a number of 4 bits has, zero among them; the other bit is the sign."""
MOST_SHIFT = 7


@dataclass
class RoundedInputs:
    """A linear layer over inputs of 4 bits.

    Shifts are exact: each input might as well have a table of its own.

    Attributes:
        weight: [out, in].
        levels: [8] the magnitudes that inputs are rounded to, ascending from 0.
        shifts: [in] uint8, by how many powers of two each input is larger when that happens; the weight's columns are
            as much smaller, so that inputs of unlike sizes share one table.
        bias: [out] or None.
    """

    weight: torch.Tensor
    levels: torch.Tensor
    shifts: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        found = {"weight": self.weight, "levels": self.levels, "shifts": self.shifts}
        return found if self.bias is None else found | {"bias": self.bias}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out], in the weight's dtype."""
        return linear(nearest(rows * powers(self.shifts).to(rows.dtype), self.levels), self.weight, self.bias)


def powers(shifts: torch.Tensor) -> torch.Tensor:
    """2^shift, float32."""
    return (1 << shifts.int()).float()


def nearest(numbers: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The nearest of the signed levels for each number; beyond the largest one, that one."""
    middles = ((levels[1:] + levels[:-1]) / 2).to(numbers.dtype)
    return levels.to(numbers.dtype)[torch.bucketize(numbers.abs(), middles)] * numbers.sign()
