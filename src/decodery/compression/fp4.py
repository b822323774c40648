"""Weights, and what they are multiplied with, of 4 bits in floating point: LLM-FP4's search for formats and biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.models.loaders.store import Progress
from decodery.models.native.int8 import Int8Linear
from decodery.models.native.rounded_inputs import RoundedInputs, nearest, powers
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Linear, floating

from .base import LINEARS, Change, Part, Size, Texts, rebuilt
from .each_linear import EachLinear, Made, with_linears
from .stream import Stream, cast, floats

FORMATS = {"E3M0": (3, 0), "E2M1": (2, 1), "E1M2": (1, 2)}
"""Bits of exponent and mantissa; one more is the sign."""
_MULTIPLES = (0.01, 1.2)
"""Between which multiples of the exponent bias that its largest weight asks for a row's bias is looked for."""


@register(
    "fp4",
    paper="LLM-FP4: 4-Bit Floating-Point Quantized Transformers (2023)",
    guarantee="changes the output; as a drafter of the original it does not",
)
@dataclass(frozen=True)
class FP4(EachLinear):
    """Rounds weights to 4-bit floating point, with a format per layer and an exponent bias per output.

    All codes of a row are whole multiples of its smallest one, so that the layer runs as int8, exactly; the report
    counts the 4 bits of a code and the 16 of a row's bias. The embedding stays as it is.

    Attributes:
        format: "search" for the one of E3M0, E2M1 and E1M2 with the least squared error of the layer's outputs on the
            calibration text, or one of them.
        points: Biases tried per output, as multiples from 0.01 to 1.2 of the bias under which the row's largest weight
            is the largest code; 1 takes that one, which reads no text where the format is given.
        activations: 4 also rounds what layers read to 4 bits, with a format and a bias per layer, and for every input a
            power of two that brings it near the largest one's size and that the weights' exponents take back (the
            pre-shifted exponent bias); biases and formats of both are searched in turns, `rounds` times. Such layers
            are simulated in floating point and slower than the original's. 8 leaves inputs to the kernels.
        rounds: Turns of the search of biases and formats.
    """

    format: Literal["search", "E3M0", "E2M1", "E1M2"] = "search"
    points: int = 101
    activations: Literal[4, 8] = 8
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.activations not in (4, 8):
            raise SettingsError(f"fp4 rounds activations to 4 bits, or leaves them in 8, not {self.activations}")
        if self.rounds < 1:
            raise SettingsError(f"fp4 searches in at least one round, not {self.rounds}")
        if self.format != "search" and self.format not in FORMATS:
            raise SettingsError(f"the formats of fp4 are search, {', '.join(FORMATS)}, not {self.format!r}")
        if self.points < 1:
            raise SettingsError(f"fp4 tries at least one bias per output, not {self.points}")

    @property
    def reads(self) -> bool:
        return self.format == "search" or self.points > 1 or self.activations == 4

    @property
    def formats(self) -> list[str]:
        """Those that are tried."""
        return list(FORMATS) if self.format == "search" else [self.format]

    @property
    def multiples(self) -> list[float]:
        """Of the bias under which the largest magnitude is the largest code; that one is always among them."""
        tried = torch.linspace(*_MULTIPLES, self.points, dtype=torch.float32, device="cpu").tolist()
        return [1.0, *(tried if self.points > 1 else [])]

    def change(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        if self.activations == 8:
            return super().change(model, texts, progress)
        return self._rounding(model, texts, progress)

    def linear(self, whole: Dense, gram: torch.Tensor | None, itemsize: int) -> Made:
        def cost(weight: torch.Tensor) -> torch.Tensor:
            difference = weight - whole.weight
            outer = difference if gram is None else difference @ gram.to(difference.dtype)
            return (outer * difference).sum(dim=1)

        weight, scale = self._weights(whole.weight, cost)
        made = Int8Linear(weight.to(torch.int8), scale, None if whole.bias is None else whole.bias.float())
        outputs, inputs = made.shape
        return Made(made, Size(outputs * inputs / 2 + 2 * outputs, outputs * inputs))

    def _weights(
        self, weight: torch.Tensor, cost: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [out, in] as integers and their scale [out] float32, in the format that costs least.

        cost: of rounded weights [out, in] the squared error [out] of every output.
        """
        found = [self._searched(weight, name, cost) for name in self.formats]
        values, scale, _ = min(found, key=lambda each: float(each[2].sum()))
        return values, scale

    def _searched(
        self, weight: torch.Tensor, name: str, cost: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_weights`, in one format, and the squared error [out] of every output."""
        levels, largest = codes(name), weight.abs().amax(dim=1).float()
        best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for multiple in self.multiples:
            scale = smallest(largest, name, multiple)
            values = nearest(weight / scale.clamp(min=1e-30)[:, None], levels)
            error = cost(values * scale[:, None])
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

    @torch.no_grad()
    def _rounding(self, model: Transformer, texts: Texts, progress: Progress) -> Change:
        """A copy whose layers round what they read. Layers read what the changed ones before them give."""
        stream, weights = Stream(model, list(texts)), model.weights
        layers, parts = [], []
        for index, layer in enumerate(weights.layers):
            whole = floats(layer, stream.dtype)
            noted = {name: _Noted(getattr(whole, name)) for name in LINEARS}
            stream.through(index, with_linears(whole, noted))
            made = {name: self.rounded(getattr(whole, name), noted[name].some()) for name in LINEARS}
            for name, (linear, error) in made.items():
                outputs, inputs = linear.shape
                # A code each, a bias per row and one for the inputs, whose shifts are of at most three bits.
                size = Size(outputs * inputs / 2 + 2 * outputs + 3 * inputs / 8 + 2, outputs * inputs)
                parts.append(Part(f"layers.{index}.{name}", error, size))
            layers.append(with_linears(whole, {name: linear for name, (linear, _) in made.items()}))
            stream.rows = stream.through(index, layers[-1])
            progress("transforming", index + 1, len(weights.layers))
        head = cast(floating(weights.head), stream.dtype)
        tied = getattr(weights.head, "weight", None) is weights.embedding
        embedding = head.weight if tied else weights.embedding.to(stream.dtype)
        norm = weights.norm.to(stream.dtype)
        return Change(rebuilt(model, embedding=embedding, layers=layers, norm=norm, head=head), tuple(parts))

    def rounded(self, whole: Dense, rows: torch.Tensor) -> tuple[RoundedInputs, float]:
        """A layer of 4-bit weights and inputs, and the share of its outputs' energy on rows that it loses.

        It begins with the largest magnitudes and E2M1, where that is tried. What one of the two has now is among what
        is tried for it, so that no round makes the error larger.
        """
        outputs = rows @ whole.weight.T
        largest = rows.abs().amax(dim=0)
        first = "E2M1" if "E2M1" in self.formats else self.formats[0]
        nothing = partial(torch.zeros, len(whole.weight), dtype=torch.float32, device="cpu")
        values, scale, _ = self._searched(whole.weight, first, lambda weight: nothing())
        weight, inputs = values * scale[:, None], input_levels(largest, first, 1.0)
        for _ in range(self.rounds):
            tried = [input_levels(largest, name, each) for name in self.formats for each in self.multiples]
            errors = [float((_read(rows, *each) @ weight.T - outputs).square().sum()) for each in tried]
            inputs = tried[errors.index(min(errors))]
            read = _read(rows, *inputs)
            own, other = read.T @ read, outputs.T @ read

            def cost(weight: torch.Tensor, own: torch.Tensor = own, other: torch.Tensor = other) -> torch.Tensor:
                # But for what does not hang on the weights.
                return ((weight @ own - 2 * other) * weight).sum(dim=1)

            values, scale = self._weights(whole.weight, cost)
            weight = values * scale[:, None]
        levels, shifts = inputs
        lost = (_read(rows, levels, shifts) @ weight.T - outputs).square().sum() / outputs.square().sum()
        kept = (weight / powers(shifts)).to(whole.weight.dtype)
        return RoundedInputs(kept, levels, shifts, whole.bias), float(lost)


_NOTED = 512
"""Rows that biases of inputs are searched on."""


@dataclass
class _Noted:
    """A linear layer that notes what it is given."""

    linear: Linear
    rows: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows.append(rows)
        return self.linear(rows)

    def some(self) -> torch.Tensor:
        """[n, in], some of them, evenly spaced."""
        rows = torch.cat(self.rows)
        return rows[:: max(1, len(rows) // _NOTED)]


def smallest(largest: torch.Tensor, name: str, multiple: float) -> torch.Tensor:
    """The smallest codes of a format under a multiple of the exponent biases that `largest` asks for.

    With b the exponent bias, the smallest code is 2^(1 - mantissa - b).

    Args:
        largest: Magnitudes, each of which is the largest code where the multiple is 1.
    """
    sizes = (largest.float() / codes(name)[-1]).clamp(min=1e-30)
    if multiple == 1:
        return sizes
    bias = 1 - FORMATS[name][1] - sizes.log2()
    return torch.exp2(1 - FORMATS[name][1] - bias * multiple)


def input_levels(largest: torch.Tensor, name: str, multiple: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels [8] float32 that inputs are rounded to, and the shifts [in] uint8 that they get before.

    Args:
        largest: [in] of every input, at least one above 0.
        multiple: Of the bias under which the largest of all is the largest code.
    """
    exponent, mantissa = FORMATS[name]
    most = largest.float().max().clamp(min=1e-30)
    step = smallest(most, name, multiple)
    # An input that is nothing may have any bias; it gets the largest there is.
    sizes = largest.float().clamp(min=float(most) * 2.0**-64) / codes(name)[-1]
    first, biases = ((1 - mantissa - each.log2()).round() for each in (step, sizes))
    shifts = (biases - first).clamp(0, 2**exponent - 1).to(torch.uint8)
    return codes(name) * step, shifts


def _read(rows: torch.Tensor, levels: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Rows [n, in] as inputs of 4 bits, in their own sizes."""
    scale = powers(shifts).to(rows.dtype)
    return nearest(rows * scale, levels) / scale


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
    return torch.tensor(found, dtype=torch.float32, device="cpu")
