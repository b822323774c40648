"""GPTQ (2022) folders: AutoGPTQ, GPTQModel and what `transformers` saves, of 2, 3, 4 and 8 bits.

The numbers of neighbouring inputs of an output stand in one string of 32-bit words, and so do the zeros of neighbouring
outputs. `g_idx` says which group each input belongs to: with act-order (`desc_act`) these are no neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..fields import Flag, Kind, Text, Whole
from .integers import Integers, unpacked
from .weight import Format, Tensors, read_fields

FLOATS = ("F16", "BF16", "F32")
"""What steps may be."""
_BITS = (2, 3, 4, 8)
_CONFIG: dict[str, Kind] = {
    "quant_method": Text(64),
    "bits": Whole(1, 32),
    "group_size": Whole(-1, 1 << 20),
    "desc_act": Flag(),
    "checkpoint_format": Text(64),
    "format": Text(64),
}
_OFF: dict[str, tuple[Any, ...]] = {
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32"),
    "adapter": (None, {}),
    "rotation": (None, ""),
}
_UNREAD = (
    # How the numbers were found, which the tensors do not depend on.
    *("sym", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset", "tokenizer"),
    *("batch_size", "block_name_to_quantize", "cache_block_outputs", "modules_in_block_to_quantize", "lm_head"),
    *("module_name_preceding_first_block", "modules_to_not_convert", "model_seqlen", "model_name_or_path"),
    *("model_file_base_name", "pad_token_id", "meta", "hyb_act", "act_group_aware", "mse", "offload_to_disk"),
    # What holds for some modules only, which their tensors say.
    "dynamic",
    # Which kernels others run.
    *("backend", "exllama_config", "use_exllama", "use_cuda_fp16", "disable_exllama", "max_input_length"),
)
"""Fields that say nothing of the weights that tensors do not say."""


@dataclass(frozen=True)
class GPTQ(Format):
    """How a folder keeps its weights.

    Attributes:
        bits: Of a number, in layers whose `g_idx` does not say how many inputs there are.
        group: Inputs that share a step, -1: all.
        added: To a stored zero.
        reordered: Whether `g_idx` is needed.
    """

    bits: int
    group: int
    added: int
    reordered: bool

    methods = ("gptq",)

    @classmethod
    def read(cls, raw: Any, origin: str) -> GPTQ:
        """See `Format.read`."""
        fields = read_fields(raw, origin, _CONFIG, _UNREAD, _OFF)
        if (bits := fields.get("bits", 4)) not in _BITS:
            raise UnsupportedModel(f"{origin}: GPTQ weights of {bits} bits are not read: 2, 3, 4 and 8 are")
        layout = (fields.get("checkpoint_format") or fields.get("format", "gptq")).lower()
        if layout not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(f"{origin}: GPTQ weights laid out as {layout!r} are not read: gptq and gptq_v2 are")
        if (group := fields.get("group_size", 128)) == 0:
            raise fields.unsupported("group_size")
        # The first version of the files has zeros less one.
        return cls(bits, group, int(layout == "gptq"), fields.get("desc_act", False))

    def weight(self, tensors: Tensors) -> Integers | None:
        """See `Format.weight`."""
        if "qweight" not in tensors:
            return None
        words, outputs = tensors.need("qweight", ("I32",), None, None)
        named = "g_idx" in tensors
        inputs = tensors.need("g_idx", ("I32", "I64"), None)[0] if named else words * 32 // self.bits
        bits = 32 * words // max(inputs, 1)
        groups, _ = tensors.need("scales", FLOATS, None, outputs)
        if bits not in _BITS or bits * inputs != 32 * words or bits * outputs % 32 or not groups:
            raise CorruptFile(
                f"the tensors of {tensors.stem} do not fit {inputs} inputs and {outputs} outputs: the file is damaged"
            )
        tensors.need("qzeros", ("I32",), groups, bits * outputs // 32)
        group = inputs if self.group == -1 else self.group
        order = tensors("g_idx").long() if named else None
        if order is None and (-(-inputs // group) != groups or (self.reordered and groups > 1)):
            raise UnsupportedModel(
                f"{tensors.stem} has no tensor g_idx, so the groups of its inputs are not known: get the whole file"
            )
        if order is not None and not (int(order.min()) >= 0 and int(order.max()) < groups):
            raise CorruptFile(f"{tensors.stem}g_idx names groups beyond the {groups} that there are")
        if order is not None and groups > 1:
            # What a module's own settings may change.
            group = int((order == order[0]).sum())

        def zeros(rows: torch.Tensor) -> torch.Tensor:
            found = unpacked(tensors("qzeros"), bits, outputs)[:, rows].int().T + self.added
            # AutoGPTQ cuts the sum to the bits of a number, but for numbers of three.
            return found if bits == 3 else found & (1 << bits) - 1

        return Integers(
            (outputs, inputs), ("qweight", "qzeros", "scales", *(["g_idx"] if named else [])), bits, group,
            numbers=lambda rows: unpacked(tensors("qweight")[:, rows].T, bits, inputs),
            steps=lambda rows: tensors("scales")[:, rows].T, zeros=zeros, order=order,
        )  # fmt: skip
