"""Folders of NVIDIA's Model Optimizer: FP8 for a tensor, for channels and for blocks, and NVFP4.

Weights of NVFP4 are two E2M1 numbers a byte; 16 inputs share an E4M3 scale, and a tensor shares a float32 one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decodery.core.errors import UnsupportedModel

from ..fields import Kind, Text
from .floats import FP8, Floats, nibbles
from .fp8 import INPUTS, fp8_weight
from .weight import Format, Tensors, read_fields

GROUP = 16
"""Inputs of NVFP4 that share a scale."""
_ALGORITHMS = ("fp8", "fp8_pb_wo", "fp8_per_channel_per_token", "nvfp4", "nvfp4_awq", "mixed_precision")
_CONFIG: dict[str, Kind] = {"quant_method": Text(64), "quant_algo": Text(64)}
_UNREAD = (
    # How inputs, keys and values are rounded, which are not; which layers are quantized and how, which tensors say.
    *("kv_cache_quant_algo", "kv_cache_scheme", "producer", "config_groups", "quantized_layers", "group_size"),
    *("ignore", "exclude_modules", "has_zero_point", "pre_quant_scale"),
)
_BLOCK = (128, 128)


@dataclass(frozen=True)
class ModelOpt(Format):
    """How a folder keeps its weights, which its tensors alone say."""

    methods = ("modelopt", "modelopt_fp4")
    beside = INPUTS

    @classmethod
    def read(cls, raw: Any, origin: str) -> ModelOpt:
        """See `Format.read`."""
        fields = read_fields(raw, origin, _CONFIG, _UNREAD, {})
        if (algorithm := fields.get("quant_algo", "")).lower() not in _ALGORITHMS:
            raise UnsupportedModel(
                f"{origin}: weights quantized by {algorithm!r} are not read: FP8, FP8_PB_WO, FP8_PER_CHANNEL_PER_TOKEN "
                "and NVFP4 are"
            )
        return cls()

    def weight(self, tensors: Tensors) -> Floats | None:
        """See `Format.weight`."""
        if "weight_scale_2" not in tensors:
            return fp8_weight(tensors, ("weight_scale",), [_BLOCK])
        outputs, half = tensors.need("weight", ("U8",), None, None)
        shape = outputs, 2 * half
        tensors.need("weight_scale", FP8, outputs, -(-shape[1] // GROUP))
        factor = tensors("weight_scale_2").float().reshape(-1)
        if len(factor) != 1:
            raise UnsupportedModel(f"{tensors.stem}weight_scale_2 has {len(factor)} numbers, where one is read")
        return Floats(
            shape, ("weight", "weight_scale", "weight_scale_2"), GROUP, lambda rows: nibbles(tensors("weight")[rows]),
            lambda rows: tensors("weight_scale")[rows].float() * factor, codes=True,
            steps=lambda rows: tensors("weight_scale")[rows].float(), factor=float(factor),
        )  # fmt: skip
