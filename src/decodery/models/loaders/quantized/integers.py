"""Weights that are integers times steps: what GPTQ, AWQ and compressed-tensors share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from decodery.core.native.kernels import Form

from ...native.block_linear import BlockLinear
from ...native.int4 import Int4Linear
from ...native.int8 import Int8Linear
from ...native.packed import BLOCK
from ...native.super_blocks import BlockKind
from ..gguf_blocks import planes
from .weight import Weight

Read = Callable[[torch.Tensor], torch.Tensor]
"""Gives something of some outputs, by their numbers [n] int64."""

_MIDDLE = {Form.BLOCKS5: 16, Form.BLOCKS8: 128}
"""What is added to integers less their zeros to make them numbers of a form."""


@dataclass
class Integers(Weight):
    """Weights `step * (number - zero)`, with steps and zeros by groups of inputs.

    Attributes:
        bits: Of a number.
        group: Inputs that share a step.
        numbers: [n, in] from 0 to 2^bits - 1.
        steps: [n, groups] floating point.
        zeros: [n, groups] integers.
        order: [in] int64 the group of each input, None where groups are neighbours.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    bits: int
    group: int
    numbers: Read
    steps: Read
    zeros: Read
    order: torch.Tensor | None = None

    @cached_property
    def _each(self) -> torch.Tensor:
        """[in] the group of each input."""
        found = torch.arange(self.shape[1], device="cpu") // self.group
        return found if self.order is None else self.order

    @cached_property
    def columns(self) -> torch.Tensor | None:
        """See `Weight.columns`: the inputs sorted by groups, where these are no neighbours."""
        if self.order is None or bool((self.order.diff() >= 0).all()):
            return None
        return self.order.argsort(stable=True)

    @cached_property
    def _sorted(self) -> torch.Tensor:
        """[in] the group of each column."""
        return self._each if self.columns is None else self._each[self.columns]

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """Those whose half-precision steps are the file's, with room for all numbers less zeros."""
        every, inputs = torch.arange(self.shape[0], device="cpu"), self.shape[1]
        if not torch.equal(self._sorted, torch.arange(inputs, device="cpu") // self.group):
            return ()
        steps, zeros = self.steps(every).float(), self.zeros(every).int()
        least, most = -int(zeros.max()), (1 << self.bits) - 1 - int(zeros.min())
        blocks = inputs % BLOCK == 0 and self.group % BLOCK == 0 and is_half(steps)
        found = {
            Form.BLOCKS4: blocks and self.bits <= 4 and is_half(steps * zeros),
            Form.BLOCKS5: blocks and least >= -16 and most <= 15 and is_half(steps * 16),
            Form.ROWS8: steps.shape[1] == 1 and least >= -128 and most <= 127,
            Form.BLOCKS8: blocks and least >= -128 and most <= 127,
        }
        return tuple(form for form, fits in found.items() if fits)

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Weight.dense`."""
        each = self._each
        return self.steps(rows).float()[:, each] * (self.numbers(rows).int() - self.zeros(rows).int()[:, each])

    def layer(self, rows: torch.Tensor, form: Form) -> BlockKind | Int8Linear:
        """See `Weight.layer`."""
        numbers, zeros, each = self.numbers(rows).int(), self.zeros(rows).int(), self._sorted
        numbers = numbers.contiguous() if self.columns is None else numbers[:, self.columns]
        if form == Form.ROWS8:
            return Int8Linear((numbers - zeros).to(torch.int8), self.steps(rows)[:, 0].float().contiguous())
        if form == Form.BLOCKS4:
            first = each[::BLOCK]
            steps = self.steps(rows).float()
            pairs = numbers.to(torch.uint8).view(len(rows), -1, 2)
            scales = steps[:, first].half(), (-(steps * zeros))[:, first].half()
            return Int4Linear(pairs[..., 0] | pairs[..., 1] << 4, *scales)
        values = (numbers - zeros[:, each] + _MIDDLE[form]).to(torch.uint8)
        step = self.steps(rows)[:, each[::BLOCK]].half()
        if form == Form.BLOCKS5:
            weight = torch.from_numpy(planes(values.numpy(), 5))
            return BlockLinear(weight, torch.stack((step, step * -_MIDDLE[form]), dim=-1))
        return BlockLinear(values, step[..., None])


def is_half(numbers: torch.Tensor) -> bool:
    """Whether numbers are finite, and the same in half precision."""
    return torch.equal(numbers.half().float(), numbers.float()) and bool(numbers.isfinite().all())


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The numbers in strings of bits, lowest bits first.

    Args:
        words: [n, m] int32, each row a string.
        bits: Of a number, at most 8.
        count: How many numbers a row has.

    Returns:
        [n, count] uint8.
    """
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        places = torch.arange(0, 32, bits, dtype=torch.int32, device="cpu")
        return (words[..., None] >> places & mask).to(torch.uint8).flatten(1)[:, :count]
    first = torch.arange(count, device="cpu") * bits
    word, place = first // 32, first % 32
    wide = pad(words.long() & 0xFFFFFFFF, (0, 1))
    return ((wide[:, word] >> place | wide[:, word + 1] << (32 - place)) & mask).to(torch.uint8)
