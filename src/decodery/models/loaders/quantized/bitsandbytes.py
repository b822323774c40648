"""Folders that were saved from models quantized by bitsandbytes: NF4 and FP4 (QLoRA, 2023), and LLM.int8() (2022).

4-bit weights are codes of the whole matrix row after row, two a byte, the first in the high half; so many of them share
a largest magnitude, which may be quantized itself. The codes of FP4 are not those of E2M1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form, library

from ...native.floats import NF4, NF4Linear
from ...native.int8 import Int8Linear
from ...native.packed import CODE_GROUP
from ..fields import Anything, Fields, Kind, Listed, Number, Text, Whole, parse_json
from .weight import Format, Tensors, Weight, read_fields

_FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_TABLES = {"nf4": NF4, "fp4": _FP4}
_INVERSE = 7.874015718698502e-3
"""What bitsandbytes takes for 1 / 127."""
_STATE: dict[str, Kind] = {
    "quant_type": Text(16),
    "blocksize": Whole(1, 1 << 16),
    "shape": Listed(Whole(1, 1 << 31), 2),
    "dtype": Text(32),
    "nested_blocksize": Whole(1, 1 << 16),
    "nested_dtype": Text(32),
    "nested_offset": Number(-1e30, 1e30),
}
_PREFIX = "weight.quant_state.bitsandbytes__"
_WORDS = ("U8", "I8", "F16", "BF16", "F32")
"""What bytes of codes may be stored as."""
_CONFIG: dict[str, Kind] = {"quant_method": Text(64), "load_in_8bit": Anything(), "load_in_4bit": Anything()}
_UNREAD = (
    *("_load_in_4bit", "_load_in_8bit", "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_has_fp16_weight"),
    *("llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_quant_storage"),
    "bnb_4bit_use_double_quant",
)


@dataclass(frozen=True)
class BitsAndBytes(Format):
    """How a folder keeps its weights, which its tensors alone say."""

    methods = ("bitsandbytes",)

    @classmethod
    def read(cls, raw: Any, origin: str) -> BitsAndBytes:
        """See `Format.read`."""
        read_fields(raw, origin, _CONFIG, _UNREAD, {})
        return cls()

    def weight(self, tensors: Tensors) -> Weight | None:
        """See `Format.weight`."""
        if "SCB" in tensors:
            return _Rows(tensors)
        named = next((name for name in _TABLES if _PREFIX + name in tensors), None)
        return None if named is None else _Codes(tensors, named)


class _Rows(Weight):
    """Integers times the largest magnitude of an output over 127."""

    forms = (Form.ROWS8,)

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        outputs, inputs = tensors.need("weight", ("I8",), None, None)
        tensors.need("SCB", ("F32", "F16"), outputs)
        self.shape, self.names = (outputs, inputs), ("weight", "SCB")
        if "weight_format" in tensors:
            self.names += ("weight_format",)
            if int(tensors("weight_format")):
                raise UnsupportedModel(f"{tensors.stem}weight is laid out for a GPU: save the model anew by rows")

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Weight.dense`."""
        return self._tensors("weight")[rows].float() * self._tensors("SCB")[rows].float()[:, None] * _INVERSE

    def layer(self, rows: torch.Tensor, form: Form) -> Int8Linear:
        """See `Weight.layer`. Scales are multiplied first: products differ by one unit in the last place at most."""
        return Int8Linear(self._tensors("weight")[rows].clone(), self._tensors("SCB")[rows].float() * _INVERSE)


class _Codes(Weight):
    """Codes of four bits, blocks of which share a largest magnitude."""

    def __init__(self, tensors: Tensors, kind: str) -> None:
        self._tensors, self._kind = tensors, kind
        name = _PREFIX + kind
        tensors.need(name, ("U8",), None)
        text = bytes(tensors(name)[: 1 << 16].tolist()).decode("utf-8", "replace")
        state = Fields(parse_json(text, f"{tensors.stem}{name}"), f"{tensors.stem}{name}", _STATE)
        shape, self._block = state.need("shape"), state.need("blocksize")
        if state.need("quant_type") != kind or len(shape) != 2 or state.raw.keys() - _STATE.keys():
            raise CorruptFile(f"{tensors.stem}{name} does not describe a matrix of {kind} codes")
        self.shape = (shape[0], shape[1])
        count = shape[0] * shape[1]
        self._blocks = -(-count // self._block)
        stored = (
            tensors("weight") if tensors.kind("weight") in _WORDS else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        if stored.nbytes != -(-count // 2):
            raise CorruptFile(
                f"{tensors.stem}weight has not the {count} codes of a matrix {shape}: the file is damaged"
            )
        self._table = _table(tensors, kind)
        self._nested = "weight.nested_absmax" in tensors
        self.names = ("weight", "weight.absmax", "weight.quant_map", name)
        self._offset = 0.0
        if self._nested:
            self.names += ("weight.nested_absmax", "weight.nested_quant_map")
            self._outer, self._offset = state.need("nested_blocksize"), state.need("nested_offset")
            tensors.need("weight.absmax", ("U8",), self._blocks)
            tensors.need("weight.nested_absmax", ("F32",), -(-self._blocks // self._outer))
            tensors.need("weight.nested_quant_map", ("F32",), 256)
        else:
            tensors.need("weight.absmax", ("F32",), self._blocks)

    @property
    def forms(self) -> tuple[Form, ...]:
        """NF4 where no block reaches beyond the end of an output, and kernels are there."""
        whole = self._kind == "nf4" and self.shape[1] % CODE_GROUP == 0 and self._block % CODE_GROUP == 0
        return (Form.CODES4,) if whole and library() is not None else ()

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Weight.dense`."""
        places = self._places(rows)
        return self._table[self._codes(places).long()] * self._largest(places // self._block)

    def layer(self, rows: torch.Tensor, form: Form) -> NF4Linear:
        """See `Weight.layer`."""
        places = self._places(rows)
        codes, scales = self._codes(places), self._largest(places[:, ::CODE_GROUP] // self._block)
        return NF4Linear(codes[:, 0::2] | codes[:, 1::2] << 4, scales)

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] where the codes of outputs stand in the whole matrix."""
        return rows[:, None] * self.shape[1] + torch.arange(self.shape[1], device="cpu")

    def _codes(self, places: torch.Tensor) -> torch.Tensor:
        pairs = self._tensors("weight").contiguous().view(torch.uint8).flatten()[places // 2]
        return torch.where(places % 2 == 0, pairs >> 4, pairs & 15)

    def _largest(self, blocks: torch.Tensor) -> torch.Tensor:
        """The largest magnitudes of blocks."""
        found = self._tensors("weight.absmax")
        if not self._nested:
            return found[blocks]
        values = self._tensors("weight.nested_quant_map")[found.long()]
        outer = self._tensors("weight.nested_absmax")[torch.arange(self._blocks, device="cpu") // self._outer]
        return (values * outer + torch.tensor(self._offset, dtype=torch.float32, device="cpu"))[blocks]


def _table(tensors: Tensors, kind: str) -> torch.Tensor:
    """[16] what codes stand for; the file's own copy must say the same.

    bitsandbytes has the values in its kernels, and does not read that copy.
    """
    table = torch.tensor(_TABLES[kind], dtype=torch.float32, device="cpu")
    tensors.need("weight.quant_map", ("F32",), 16)
    if not torch.allclose(tensors("weight.quant_map"), table, rtol=1e-5, atol=1e-7):
        raise UnsupportedModel(f"{tensors.stem}weight.quant_map has other values than {kind} codes")
    return table
