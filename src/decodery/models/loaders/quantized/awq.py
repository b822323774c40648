"""AWQ (2023) folders of 4 bits, in AutoAWQ's layouts gemm and gemv.

gemm has eight outputs of an input in one word, in an order of its own; gemv has eight inputs of an output, and rows of
steps and zeros that are wider than the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..fields import Flag, Kind, Text, Whole
from .gptq import FLOATS
from .integers import Integers, unpacked
from .weight import Format, Tensors, read_fields

_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word each of eight outputs has in gemm."""
_CONFIG: dict[str, Kind] = {
    "quant_method": Text(64),
    "bits": Whole(1, 32),
    "group_size": Whole(-1, 1 << 20),
    "version": Text(64),
    "format": Text(64),
    "backend": Text(64),
    "zero_point": Flag(),
}
_UNREAD = (
    *("modules_to_not_convert", "model_seqlen", "model_name_or_path", "dataset", "tokenizer", "batch_size", "sym"),
    *("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config", "meta", "desc_act", "true_sequential"),
    *("damp_percent", "act_group_aware", "block_name_to_quantize", "cache_block_outputs", "max_input_length"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"),
)


@dataclass(frozen=True)
class AWQ(Format):
    """How a folder keeps its weights.

    Attributes:
        group: Inputs that share a step, -1: all.
        by_outputs: Whether a word has eight inputs of an output (gemv).
    """

    group: int
    by_outputs: bool

    methods = ("awq",)

    @classmethod
    def read(cls, raw: Any, origin: str) -> AWQ:
        """See `Format.read`."""
        fields = read_fields(raw, origin, _CONFIG, _UNREAD, {})
        if (bits := fields.get("bits", 4)) != 4:
            raise UnsupportedModel(f"{origin}: AWQ weights of {bits} bits are not read: those of 4 are")
        layout = (fields.get("version") or fields.get("format", "gemm")).lower()
        if layout not in ("gemm", "gemv") or fields.get("backend", "") == "llm-awq":
            named = "llm-awq" if layout in ("gemm", "gemv") else layout
            raise UnsupportedModel(f"{origin}: AWQ weights laid out as {named!r} are not read: gemm and gemv are")
        if (group := fields.get("group_size", 128)) == 0:
            raise fields.unsupported("group_size")
        return cls(group, layout == "gemv")

    def weight(self, tensors: Tensors) -> Integers | None:
        """See `Format.weight`."""
        if "qweight" not in tensors:
            return None
        first, words = tensors.need("qweight", ("I32",), None, None)
        outputs, inputs = (first, words * _PER_WORD) if self.by_outputs else (words * _PER_WORD, first)
        group = inputs if self.group == -1 else self.group
        if not inputs or inputs % group:
            raise CorruptFile(f"{tensors.stem}qweight has {inputs} inputs, which groups of {group} do not divide")
        names, groups = ("qweight", "qzeros", "scales"), inputs // group
        if not self.by_outputs:
            tensors.need("qzeros", ("I32",), groups, words)
            tensors.need("scales", FLOATS, groups, outputs)
            return Integers(
                (outputs, inputs), names, 4, group,
                numbers=lambda rows: _outputs(tensors("qweight"), rows).T,
                steps=lambda rows: tensors("scales")[:, rows].T,
                zeros=lambda rows: _outputs(tensors("qzeros"), rows).T,
            )  # fmt: skip
        width = tensors.need("qzeros", ("I32",), outputs, None)[1]
        if groups > width * _PER_WORD:
            raise CorruptFile(f"{tensors.stem}qzeros has too few zeros for {groups} groups: the file is damaged")
        tensors.need("scales", FLOATS, outputs, width * _PER_WORD)
        return Integers(
            (outputs, inputs), names, 4, group,
            numbers=lambda rows: unpacked(tensors("qweight")[rows], 4, inputs),
            steps=lambda rows: tensors("scales")[rows, :groups],
            zeros=lambda rows: unpacked(tensors("qzeros")[rows], 4, groups),
        )  # fmt: skip


def _outputs(words: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n, outputs / 8] int32 of gemm -> some of its outputs [n, rows]."""
    places = 4 * torch.tensor(_PLACES, dtype=torch.int32, device="cpu")[rows % _PER_WORD]
    return words[:, rows // _PER_WORD] >> places & 15
