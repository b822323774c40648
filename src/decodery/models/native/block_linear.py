"""Linear layers with weights of 4, 5, 6 or 8 bits in blocks of 32 and int8 activations, summed in integers.

They hold what GGUF files keep in blocks of 32 without further loss. How many
bits a number has says what it stands for: with five, `step * number + least`; with eight, `step * (number - 128)`; with
six, `step * (number - 32)`, and with four, `step * TABLE[number]` (IQ4_NL), with a step for each half of a block.
Evenly spaced weights of four bits are an `Int4Linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decodery.core.errors import UnsupportedModel
from decodery.core.native.kernels import Form

from . import packed
from .int4 import even_steps
from .int8 import quantize_rows
from .packed import Native

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FORMS = {4: Form.TABLE4, 5: Form.BLOCKS5, 6: Form.BLOCKS6, 8: Form.BLOCKS8}
_HALF = packed.BLOCK // 2


@dataclass
class BlockLinear(Native):
    """A linear layer whose weights are codes of a few bits in blocks.

    A row of the weight begins with the lowest four bits of all numbers, the even input in the low half, and goes on
    with the others, eight inputs a byte or four, the first lowest; numbers of eight bits are bytes. The two scales of a
    block are its step and its least value, or the steps of its halves; with eight bits it has a step alone.

    Attributes:
        weight: [out, in * bits / 8] uint8.
        scales: [out, in / 32, 2] float16, of eight bits [out, in / 32, 1].
        bias: [out] float32 or None.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def quantize(cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, bits: int) -> BlockLinear:
        """A layer of 5 or 6 bits.

        Args:
            weight: [out, in] in floating point; `in` a multiple of 32.
            bias: [out] or None.
            bits: 5 for 32 even steps per block of 32, 6 for 64 even steps around 0 per half of one.

        Raises:
            UnsupportedModel: where `in` is no multiple of 32.
        """
        outputs, inputs = weight.shape
        if inputs % packed.BLOCK:
            raise UnsupportedModel(
                f"{bits} bits need layers whose inputs come in blocks of {packed.BLOCK}, not {inputs}: use int8"
            )
        if bits == 5:
            values, step, least = even_steps(weight, bits)
            numbers, scales = values.view(outputs, inputs), torch.stack((step, least), dim=-1)
        else:
            halves = weight.detach().float().view(outputs, -1, _HALF)
            scales = (halves.abs().amax(dim=-1, keepdim=True) / 31).half()
            # A half of zeros has a step of 0; any number stands for it.
            counts = (halves / scales.float().clamp(min=2.0**-24)).round().clamp(-32, 31)
            numbers = (counts + 32).to(torch.uint8).view(outputs, inputs)
        pairs = (numbers & 15).view(outputs, -1, 2)
        more = bits - 4
        shifts = torch.arange(0, 8, more, dtype=torch.uint8, device=weight.device)
        high = ((numbers >> 4).view(outputs, -1, 8 // more) << shifts).sum(dim=-1, dtype=torch.uint8)
        packed_numbers = torch.cat((pairs[..., 0] | pairs[..., 1] << 4, high), dim=1)
        return cls(packed_numbers, scales.view(outputs, -1, 2), None if bias is None else bias.detach().float())

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.scales.shape[0], packed.BLOCK * self.scales.shape[1]

    @property
    def bits(self) -> int:
        """Of a number."""
        return 8 * self.weight.shape[1] // self.shape[1]

    @property
    def form(self) -> Form:
        """What kernels call it."""
        return _FORMS[self.bits]

    def values(self) -> torch.Tensor:
        """[out, in] float32 what the numbers stand for before any scale, integers from -128 to 127."""
        inputs, bits = self.shape[1], self.bits
        if bits == 8:
            return self.weight.float() - 128
        numbers = stored_numbers(self.weight, inputs, bits)
        if bits == 4:
            return torch.tensor(TABLE, dtype=torch.float32, device=numbers.device)[numbers.long()]
        return numbers.float() - (32 if bits == 6 else 0)

    def dense(self) -> torch.Tensor:
        """[out, in] float32: the weights this layer stands for."""
        outputs, inputs = self.shape
        halves = self.values().view(outputs, -1, 2, _HALF)
        if self.bits == 5:
            first, second = self.scales.float()[..., None, None].unbind(2)
            return (halves * first + second).view(outputs, inputs)
        return (halves * self.scales.float()[..., None]).view(outputs, inputs)

    def portable(self, rows: torch.Tensor) -> torch.Tensor:
        """The same arithmetic in PyTorch alone."""
        outputs, inputs = self.shape
        parts = 1 if self.bits in (5, 8) else 2
        width = packed.BLOCK // parts
        whole, scale = quantize_rows(rows.float())
        whole = whole.view(len(rows), -1, width)
        values, scales = self.values().view(outputs, -1, width), self.scales.float()
        result = torch.zeros(len(rows), outputs, device=rows.device, dtype=torch.float32)
        for number in range(inputs // width):
            block = number // parts
            of_group = scale[:, block // 2, None]
            # Sums of 32 products stay below 2^24: exact in float32, whatever the order.
            sums = whole[:, number] @ values[:, number].T
            result += sums * scales[:, block, number % parts] * of_group
            if self.bits == 5:
                result += scales[:, block, 1] * (of_group * whole[:, number].sum(dim=-1, keepdim=True))
        return result if self.bias is None else result + self.bias

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file keeps of this layer, by name."""
        kept = {"weight": self.weight, "scales": self.scales}
        return kept if self.bias is None else kept | {"bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> BlockLinear:
        """The layer that `tensors` came from."""
        return cls(tensors["weight"], tensors["scales"], tensors.get("bias"))


def stored_numbers(weight: torch.Tensor, inputs: int, bits: int) -> torch.Tensor:
    """[out, inputs] uint8 numbers of 4, 5 or 6 bits that `BlockLinear.weight` keeps."""
    low = weight[:, : inputs // 2]
    numbers = torch.stack((low & 15, low >> 4), dim=-1).view(len(weight), inputs)
    if bits == 4:
        return numbers
    more = bits - 4
    places = torch.arange(0, 8, more, dtype=torch.uint8, device=low.device)
    high = (weight[:, inputs // 2 :, None] >> places) & ((1 << more) - 1)
    return numbers | high.view(len(weight), inputs) << 4
