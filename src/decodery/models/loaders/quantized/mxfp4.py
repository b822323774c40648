"""MXFP4 experts as gpt-oss folders keep them: E2M1 numbers, 32 of which share a power of two.

One pair of tensors holds all experts of a layer, `NAME_blocks` [experts, out, groups, 16] and `NAME_scales` [experts,
out, groups]: the outputs of one expert follow those of the expert before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...native.packed import BLOCK
from ..fields import Kind, Text
from .floats import Floats, nibbles, powers
from .weight import Format, Tensors, read_fields

_CONFIG: dict[str, Kind] = {"quant_method": Text(64)}
_UNREAD = ("modules_to_not_convert", "dequantize")


@dataclass(frozen=True)
class MXFP4(Format):
    """How a folder keeps its experts."""

    methods = ("mxfp4",)

    @classmethod
    def read(cls, raw: Any, origin: str) -> MXFP4:
        """See `Format.read`."""
        read_fields(raw, origin, _CONFIG, _UNREAD, {})
        return cls()

    def weight(self, tensors: Tensors) -> Floats | None:
        """See `Format.weight`.

        The stem is the name of the experts, such as "model.layers.0.mlp.experts.down_proj".
        """
        if "_blocks" not in tensors:
            return None
        experts, outputs, groups, _ = tensors.need("_blocks", ("U8",), None, None, None, BLOCK // 2)
        tensors.need("_scales", ("U8",), experts, outputs, groups)

        def rows_of(name: str, rows: torch.Tensor) -> torch.Tensor:
            return tensors(name).view(experts * outputs, -1)[rows]

        return Floats(
            (experts * outputs, groups * BLOCK), ("_blocks", "_scales"), BLOCK,
            lambda rows: nibbles(rows_of("_blocks", rows)), lambda rows: powers(rows_of("_scales", rows)), codes=True,
        )  # fmt: skip
