"""LoRA adapters in the folders that PEFT writes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ..errors import CorruptFile, UnsupportedModel
from .artifact import read_tensors
from .config import MOST_LAYERS
from .fields import Fields, Flag, Kind, Named, Number, Text, Whole, read_json

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_MOST_BYTES = 1 << 34
_KINDS: dict[str, Kind] = {
    "peft_type": Text(64),
    "r": Whole(1, 1 << 16),
    "lora_alpha": Number(0.0, 1e6),
    "bias": Text(64),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), Flag()),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), Named(Number(0.0, 1e6), 1 << 12)),
}
_NAME = re.compile(
    r"(?:[\w.]+\.)?layers\.(\d{1,6})\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.lora_([AB])\.weight"
)
_PARTS = {"o": "output"}
"""What parts are called here where they are not called as there."""


def read_lora(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By parts such as "layers.3.q", [out, r] and [r, in], whose product is added to its matrix.

    Raises CorruptFile for a damaged folder, UnsupportedModel for what adds more than such products.
    """
    fields = Fields(read_json(folder / CONFIG), str(folder / CONFIG), _KINDS)
    if fields.need("peft_type") != "LORA":
        raise fields.unsupported("peft_type")
    for name, plain in (("bias", "none"), ("use_dora", False), ("fan_in_fan_out", False), ("rank_pattern", {})):
        if fields.get(name, plain) != plain:
            raise fields.unsupported(name)
    if fields.get("alpha_pattern", {}):
        raise fields.unsupported("alpha_pattern")
    rank = fields.need("r")
    scale = fields.need("lora_alpha") / (rank**0.5 if fields.get("use_rslora", False) else rank)
    path = folder / _WEIGHTS
    if not path.is_file():
        raise CorruptFile(f"{folder} has no {_WEIGHTS}: save the adapter as safetensors")
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    tensors, _ = read_tensors(path, most=_MOST_BYTES)
    for name, tensor in tensors.items():
        found = _NAME.fullmatch(name)
        if found is None or int(found[1]) >= MOST_LAYERS:
            raise UnsupportedModel(f"{path} adds something at {name[:200]}: only LoRA of linear layers is read")
        if tensor.ndim != 2 or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CorruptFile(f"{path}: {name} is no matrix of finite numbers")
        part = f"layers.{int(found[1])}.{_PARTS.get(found[2], found[2])}"
        pairs.setdefault(part, {})[found[3]] = tensor.float()
    if not pairs or any(pair.keys() != {"A", "B"} for pair in pairs.values()):
        raise CorruptFile(f"{path} lacks halves of what it adds: save the adapter anew")
    return {part: (scale * pair["B"], pair["A"]) for part, pair in pairs.items()}
