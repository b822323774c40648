"""4-bit weights of GPTQ and AWQ checkpoints in the form of `Int4Linear`: step * (number - zero), by groups of inputs.

GPTQ (2022) packs eight inputs of an output into one word, AWQ (2023) eight outputs of an input, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CorruptFile, UnsupportedModel
from .fields import Fields, Flag, Kind, Text, Whole
from .int4 import Int4Linear
from .packed import BLOCK

Read = Callable[[str], torch.Tensor]
"""Gives a tensor by the last part of its name, such as "qweight"."""

_PER_WORD = 8
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ has each of eight outputs."""
_MOST_GROUP = 1 << 20
_CONFIG: dict[str, Kind] = {
    "quant_method": Text(64),
    "bits": Whole(1, 32),
    "group_size": Whole(-1, _MOST_GROUP),
    "desc_act": Flag(),
    "checkpoint_format": Text(64),
    "version": Text(64),
}


@dataclass(frozen=True)
class FourBits:
    """How a checkpoint keeps its 4-bit weights. group: inputs that share a step, -1: all; added: to a stored zero."""

    awq: bool
    group: int
    added: int

    @classmethod
    def read(cls, raw: Any, origin: str) -> FourBits:
        """From a `quantization_config`. Raises UnsupportedModel for what is not read here."""
        fields = Fields(raw, f"{origin}: quantization_config", _CONFIG)
        method, bits = fields.get("quant_method", ""), fields.get("bits", 4)
        if method not in ("gptq", "awq") or bits != 4:
            raise UnsupportedModel(f"{origin}: quantization_config: {method!r} with {bits} bits is not supported")
        layout = fields.get("version" if method == "awq" else "checkpoint_format", "")
        if layout.lower() not in ("", "gemm", "gptq", "gptq_v2"):
            raise UnsupportedModel(f"{origin}: {method} weights laid out as {layout!r} are not supported")
        group = fields.get("group_size", 128)
        if group == 0 or (group > 0 and group % BLOCK):
            raise UnsupportedModel(f"{origin}: groups of {group} inputs are not supported, multiples of {BLOCK} are")
        # The first version of GPTQ's files has zeros less one.
        return cls(method == "awq", group, int(method == "gptq" and layout != "gptq_v2"))

    def shape(self, read: Read) -> tuple[int, int]:
        """(out, in) of a layer. Raises CorruptFile where its tensors do not fit together."""
        weight, zeros, scales = read("qweight"), read("qzeros"), read("scales")
        if weight.dim() != 2 or scales.dim() != 2 or {weight.dtype, zeros.dtype} != {torch.int32}:
            raise CorruptFile(
                "4-bit weights should be 32-bit words in two dimensions, and so their zeros: the file is damaged"
            )
        packed, other = weight.shape
        outputs, inputs = (other * _PER_WORD, packed) if self.awq else (other, packed * _PER_WORD)
        group = inputs if self.group == -1 else self.group
        groups = -(-inputs // group)
        if inputs % BLOCK or scales.shape != (groups, outputs) or zeros.shape != (groups, outputs // _PER_WORD):
            raise CorruptFile(
                f"4-bit weights [{outputs}, {inputs}] should have steps for {groups} groups of inputs, not "
                f"{list(scales.shape)}: the file is damaged"
            )
        return outputs, inputs

    def blocks(self, read: Read, begin: int, end: int) -> Int4Linear:
        """Outputs of a layer."""
        _, inputs = self.shape(read)
        group = inputs if self.group == -1 else self.group
        numbers = self._numbers(read("qweight"), begin, end)
        if self.awq:
            zeros = _outputs(read("qzeros"), begin, end)
        else:
            zeros = _bits(read("qzeros")).flatten(1)[:, begin:end] + self.added & 15
        scales = read("scales")[:, begin:end].half()
        least = (-(scales.float() * zeros)).half()
        each = torch.arange(inputs // BLOCK, device="cpu") * BLOCK // group
        pairs = numbers.to(torch.uint8).T.reshape(end - begin, inputs // 2, 2)
        return Int4Linear(pairs[..., 0] | pairs[..., 1] << 4, scales[each].T, least[each].T)

    def _numbers(self, weight: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[in, outputs]"""
        if self.awq:
            return _outputs(weight, begin, end)
        return _bits(weight[:, begin:end]).transpose(1, 2).flatten(0, 1)

    def check_order(self, read: Read) -> None:
        """Refuse inputs that are not in the order of their groups."""
        order, (_, inputs) = read("g_idx"), self.shape(read)
        group = inputs if self.group == -1 else self.group
        if not torch.equal(order.long(), torch.arange(inputs, device="cpu") // group):
            raise UnsupportedModel(
                "GPTQ weights with reordered inputs (desc_act) are not supported: get the file made without"
            )


def read_four_bits(config: Any, origin: str) -> FourBits | None:
    """How the weights that go with a config.json are kept; None where they are floating point."""
    raw = config.get("quantization_config")
    return FourBits.read(raw, origin) if raw else None


def _bits(words: torch.Tensor) -> torch.Tensor:
    """[n, m] int32 -> the eight numbers of each word [n, m, 8], lowest bits first."""
    return words[..., None] >> (4 * torch.arange(_PER_WORD, dtype=torch.int32, device="cpu")) & 15


def _outputs(words: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """[n, outputs / 8] int32 of AWQ -> some of its outputs [n, end - begin]."""
    first = begin // _PER_WORD
    some = _bits(words[:, first : -(-end // _PER_WORD)])[..., list(_AWQ_ORDER)].flatten(1)
    return some[:, begin - first * _PER_WORD : end - first * _PER_WORD]
