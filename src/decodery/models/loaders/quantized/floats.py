"""Weights that are small floating point numbers times scales: FP8, and FP4 of MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from decodery.core.errors import CorruptFile
from decodery.core.native.kernels import Form, library

from ...native.floats import Float4Linear, Float8Linear, MXFP4Linear, powers
from ...native.packed import BLOCK, FLOAT_GROUP
from .integers import is_half
from .weight import Tensors, Weight

Read = Callable[[torch.Tensor], torch.Tensor]
"""Gives something of some outputs, by their numbers [n] int64."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lowest three bits of an FP4 number stand for; the fourth is the sign."""
FP8 = ("F8_E4M3",)
_EXPONENTS = ("U8", "F8_E8M0")
"""What powers of two are kept as: their exponents plus 127."""
_HALF = BLOCK // 2


@dataclass
class Floats(Weight):
    """Weights `value * scale`, with scales by groups of inputs.

    Attributes:
        group: Inputs that share a scale.
        values: [n, in] FP8, or FP4 codes where `codes`.
        scales: [n, groups] float32.
        codes: Whether values are FP4 codes [n, in] uint8.
        steps: [n, groups] scales over `factor`, as the file has them; None where scales are powers of two.
        factor: What scales of the whole tensor have in common.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    group: int
    values: Read
    scales: Read
    codes: bool = False
    steps: Read | None = None
    factor: float = 1.0

    def _each(self, width: int) -> torch.Tensor:
        """The group of each `width`-th input."""
        return torch.arange(0, self.shape[1], width, device="cpu") // self.group

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """FP4 of powers of two or of steps in half precision; FP8 where scales are for so many inputs.

        Without kernels FP8 is multiplied input by input.
        """
        if not self.codes:
            coarse = self.group % FLOAT_GROUP == 0 or self.group >= self.shape[1]
            return (Form.FLOAT8,) if coarse and library() is not None else ()
        every = torch.arange(self.shape[0], device="cpu")
        if self.steps is None:
            fits = self.shape[1] % BLOCK == 0 and bool(self.scales(every).isfinite().all())
            return (Form.MXFP4,) if fits else ()
        fits = self.shape[1] % BLOCK == 0 and self.group % _HALF == 0 and is_half(self.steps(every) / 2)
        return (Form.FLOAT4,) if fits else ()

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Weight.dense`."""
        values = e2m1(self.values(rows)) if self.codes else self.values(rows).float()
        return values * self.scales(rows)[:, self._each(1)]

    def layer(self, rows: torch.Tensor, form: Form) -> Float4Linear | Float8Linear | MXFP4Linear:
        """See `Weight.layer`. A factor of FP4 is multiplied last: products differ in the last place at most."""
        values = self.values(rows)
        if form == Form.FLOAT8:
            codes = values.view(torch.uint8)
            if bool((codes & 127 == 127).any()):
                raise CorruptFile("FP8 weights have numbers that are none: the file is damaged")
            return Float8Linear(codes, self.scales(rows)[:, self._each(FLOAT_GROUP)])
        packed = values[:, 0::2] | values[:, 1::2] << 4
        if self.steps is None:
            return MXFP4Linear(packed, (self.scales(rows).view(torch.int32) >> 23).to(torch.uint8))
        steps = (self.steps(rows) / 2)[:, self._each(_HALF)].half()
        return Float4Linear(packed, steps, torch.full((len(rows),), self.factor, dtype=torch.float32, device="cpu"))


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """FP4 codes -> float32 numbers."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float32, device="cpu")
    return values[codes.long()]


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, m] uint8 -> the halves of each byte [n, 2 m], the low one first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def scale_grid(
    tensors: Tensors, name: str, shape: tuple[int, int], blocks: Sequence[tuple[int, int]]
) -> tuple[Read, int] | None:
    """Reads the scales of a matrix, whatever they are kept for.

    Args:
        tensors: Of the layer.
        name: Last part of the name of the scales: one number, one of each output, of each block or of each group of
            inputs; blocks may be incomplete at the end.
        shape: (out, in) of the matrix.
        blocks: Outputs and inputs that a block may have; without any, rows of several scales are groups of inputs.

    Returns:
        A function that gives scales [n, groups] float32 of some outputs, and how many inputs share one; None where the
        scales have none of these shapes.
    """
    outputs, inputs = shape
    kind, found = tensors.kind(name), tensors.shape(name)
    # What is between has one entry: some writers keep it.
    sizes = [size for size in found if size != 1]
    if kind not in ("F32", "F16", "BF16", *_EXPONENTS):
        return None
    steps = None
    if not sizes:
        # A column of one output, too, is one number.
        steps = outputs, inputs
    elif sizes == [outputs] and found[0] == outputs:
        steps = 1, inputs
    else:
        steps = next((each for each in blocks if _grid(shape, each) == sizes), None)
        if steps is None and not blocks and len(found) == 2 and found[0] == outputs and inputs % found[1] == 0:
            steps = 1, inputs // found[1]
    if steps is None:
        return None
    height, width = steps
    columns = -(-inputs // width)

    def read(rows: torch.Tensor) -> torch.Tensor:
        some = tensors(name).reshape(-1, columns)[rows // height]
        return powers(some) if kind in _EXPONENTS else some.float()

    return read, width


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> list[int]:
    """How many blocks a matrix has in each direction, but for directions in which it has one."""
    sizes = (-(-size // step) for size, step in zip(shape, block, strict=True))
    return [size for size in sizes if size != 1]
