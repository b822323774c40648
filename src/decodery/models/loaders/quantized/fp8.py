"""FP8 folders of `transformers` and vLLM: DeepSeek's blocks, AutoFP8's tensors and FBGEMM's channels.

Weights are E4M3 numbers times scales. What inputs are multiplied by before they are rounded (`input_scale`,
`activation_scale`), and the scales of quantized caches, are not used: inputs are not rounded to FP8 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decodery.core.errors import CorruptFile

from ..fields import Kind, Listed, Text, Whole
from .floats import FP8, Floats, scale_grid
from .weight import Format, Tensors, read_fields

INPUTS = (
    ".input_scale",
    ".activation_scale",
    ".input_scale_ub",
    ".output_scale",
    ".kv_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
"""How the names of tensors end that say how others round inputs, keys and values."""
_CONFIG: dict[str, Kind] = {
    "quant_method": Text(64),
    "weight_block_size": Listed(Whole(1, 1 << 16), 2),
}
_OFF: dict[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),
    "expert_dtype": (None, "fp8"),
}
_UNREAD = (
    # How inputs, keys and values are rounded, which are not.
    *("activation_scheme", "activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_method"),
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"),
)


@dataclass(frozen=True)
class ScaledFP8(Format):
    """How a folder keeps its weights.

    Attributes:
        block: Outputs and inputs that share a scale; None where a tensor or an output has one.
    """

    block: tuple[int, int] | None

    methods = ("fp8", "fbgemm_fp8")
    beside = INPUTS

    @classmethod
    def read(cls, raw: Any, origin: str) -> ScaledFP8:
        """See `Format.read`."""
        fields = read_fields(raw, origin, _CONFIG, _UNREAD, _OFF)
        block = fields.get("weight_block_size")
        if block is not None and len(block) != 2:
            raise CorruptFile(f"{origin}: weight_block_size should have two numbers, not {len(block)}")
        return cls(None if block is None else (block[0], block[1]))

    def weight(self, tensors: Tensors) -> Floats | None:
        """See `Format.weight`."""
        return fp8_weight(tensors, ("weight_scale_inv", "weight_scale"), [self.block] if self.block else [])


def fp8_weight(tensors: Tensors, scales: Sequence[str], blocks: Sequence[tuple[int, int]]) -> Floats | None:
    """The FP8 weight of a layer, None where it has none.

    Args:
        tensors: Of the layer.
        scales: What the scales may be called; all of them multiply.
        blocks: See `scale_grid`.
    """
    if "weight" not in tensors or tensors.kind("weight") not in FP8:
        return None
    outputs, inputs = tensors.need("weight", FP8, None, None)
    name = next((name for name in scales if name in tensors), scales[0])
    if name not in tensors or (found := scale_grid(tensors, name, (outputs, inputs), blocks)) is None:
        raise CorruptFile(
            f"the FP8 weight {tensors.stem}weight [{outputs}, {inputs}] has no {name} for the whole, for each output "
            "or for each block: the file is incomplete or damaged"
        )
    read, width = found
    return Floats((outputs, inputs), ("weight", name), width, lambda rows: tensors("weight")[rows], read)
