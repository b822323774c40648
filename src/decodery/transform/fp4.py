"""Weights of 4 bits in floating point: LLM-FP4's search for formats and exponent biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import SettingsError
from ..model.int8 import Int8Linear
from ..model.weights import Dense
from ..registry import register
from .base import Size
from .each_linear import EachLinear, Made

FORMATS = {"E3M0": (3, 0), "E2M1": (2, 1), "E1M2": (1, 2)}
"""Bits of exponent and mantissa; one more is the sign."""
_SHRINK = (0.45, 1.05)
"""Between which shares of a row's largest weight its largest code is looked for."""


@register(
    "fp4",
    paper="LLM-FP4: 4-Bit Floating-Point Quantized Transformers (2023)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class FP4(EachLinear):
    """Rounds weights to 4-bit floating point numbers, with a format per layer and an exponent bias per output.

    format: "search" for the one of E3M0, E2M1 and E1M2 with the least squared error of the layer's outputs on the
    calibration text, or one of them. points: biases tried per output, by the magnitude of the largest code; 1 takes
    each row's largest weight for it, which reads no text where the format is given. Of the paper these are the weights:
    activations stay in 8 bits. All codes of a row are whole multiples of its smallest one, so that the layer runs as
    int8, exactly; the report counts the 4 bits of a code and the 16 of a row's bias.
    """

    format: Literal["search", "E3M0", "E2M1", "E1M2"] = "search"
    points: int = 25

    def __post_init__(self) -> None:
        if self.format != "search" and self.format not in FORMATS:
            raise SettingsError(f"fp4 knows the formats search, {', '.join(FORMATS)}, not {self.format!r}")
        if self.points < 1:
            raise SettingsError(f"fp4 tries at least one bias per output, not {self.points}")

    @property
    def reads(self) -> bool:
        return self.format == "search" or self.points > 1

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        names = list(FORMATS) if self.format == "search" else [self.format]
        found = [self._searched(whole.weight, codes(name), gram) for name in names]
        weight, scale, _ = min(found, key=lambda each: float(each[2].sum()))
        made = Int8Linear(weight.to(torch.int8), scale, None if whole.bias is None else whole.bias.float())
        outputs, inputs = made.shape
        return Made(made, Size(outputs * inputs / 2 + 2 * outputs, outputs * inputs))

    def _searched(
        self, weight: torch.Tensor, levels: torch.Tensor, gram: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [out, in] as whole numbers, their scale [out] float32 and the squared error [out] of every output."""
        largest = weight.abs().amax(dim=1).float()
        shares = torch.linspace(*_SHRINK, self.points).tolist() if self.points > 1 else []
        best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        # The row's own largest weight is always among what is tried.
        for share in [1.0, *shares]:
            scale = largest * share / levels[-1]
            values = nearest(weight / scale.clamp(min=1e-30)[:, None], levels)
            difference = values * scale[:, None] - weight
            outer = difference if gram is None else difference @ gram.to(difference.dtype)
            error = (outer * difference).sum(dim=1)
            if best is None:
                best = values, scale, error
                continue
            better = error < best[2]
            best = (
                torch.where(better[:, None], values, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, error, best[2]),
            )
        assert best is not None
        return best


def codes(name: str) -> torch.Tensor:
    """[8] the magnitudes of a format's codes, ascending from 0, as multiples of the smallest one.

    A number is (1 + fraction) * 2^exponent for exponents from 1 on; below them, exponent 0 counts in the same steps
    without the one, so that zero is among the codes.
    """
    exponent, mantissa = FORMATS[name]
    step = 2**mantissa
    found = [
        fraction if power == 0 else (step + fraction) << (power - 1)
        for power in range(2**exponent)
        for fraction in range(step)
    ]
    return torch.tensor(found, dtype=torch.float32)


def nearest(weights: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The nearest of the signed levels for each weight; beyond the largest one, that one."""
    middles = ((levels[1:] + levels[:-1]) / 2).to(weights.dtype)
    return levels.to(weights.dtype)[torch.bucketize(weights.abs(), middles)] * weights.sign()
