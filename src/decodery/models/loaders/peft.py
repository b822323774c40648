"""LoRA adapters in the folders that PEFT writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import MOST_LAYERS
from ..trained.artifact import read_tensors
from .fields import Either, Fields, Flag, Kind, Named, Number, Text, Whole, read_json

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
    "init_lora_weights": Either(Flag(), Text(64)),
}
_OFF: dict[str, Any] = {
    "bias": "none", "use_dora": False, "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}
}  # fmt: skip
"""Fields that change what is added, and the value that does not."""
_UNREAD = (
    # What was trained, which the names of the tensors say, and of which model.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    # How it was trained.
    *("lora_dropout", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying"),
    # Of ways to begin that `init_lora_weights` names, and of ways to add that other fields switch on.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
)
"""Fields that say nothing of what is added."""
_BEGUN_PLAIN = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` under which the matrix itself stays as it is."""
EXCHANGED = ("pissa", "olora")
"""Those under which training begins with a part of the matrix, which is taken away from it."""
_NAME = re.compile(
    r"(?:[\w.]+\.)?layers\.(\d{1,6})\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.lora_([AB])\.weight"
)
_PARTS = {"o": "output"}
"""What parts are called here where they are not called as there."""


@dataclass(frozen=True)
class Lora:
    """What a folder of PEFT adds to matrices.

    Attributes:
        pairs: By parts such as "layers.3.q", [out, r] and [r, in], whose product is added.
        exchanged: Of `EXCHANGED`, which part of a matrix the product takes the place of; "" for none.
        scale: What products were multiplied by.
    """

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    exchanged: str
    scale: float


def read_lora(folder: Path) -> Lora:
    """Read a folder.

    Raises:
        CorruptFile: The folder is damaged.
        UnsupportedModel: It adds more than products of two matrices, or says something that is not known.
    """
    fields = Fields(read_json(folder / CONFIG), str(folder / CONFIG), _KINDS)
    exchanged = _exchanged(fields)
    rank = fields.get("r", 8)
    scale = fields.get("lora_alpha", 8) / (rank**0.5 if fields.get("use_rslora", False) else rank)
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
        if tensor.shape["AB".index(found[3])] != rank:
            raise CorruptFile(f"{path}: {name} is {list(tensor.shape)}, and {CONFIG} says r = {rank}")
        part = f"layers.{int(found[1])}.{_PARTS.get(found[2], found[2])}"
        pairs.setdefault(part, {})[found[3]] = tensor.float()
    if not pairs or any(pair.keys() != {"A", "B"} for pair in pairs.values()):
        raise CorruptFile(f"{path} has only one of two matrices of some parts: save the adapter again")
    return Lora({part: (scale * pair["B"], pair["A"]) for part, pair in pairs.items()}, exchanged, scale)


def _exchanged(fields: Fields) -> str:
    """See `Lora`. Raises UnsupportedModel for a field that cannot be heeded, by its name."""
    if fields.need("peft_type") != "LORA":
        raise fields.unsupported("peft_type")
    for name, plain in _OFF.items():
        if fields.get(name, plain) != plain:
            raise fields.unsupported(name)
    # PEFT writes all fields that it has; what is empty is off.
    others = (name for name in fields.raw if name not in fields.kinds and name not in _UNREAD)
    if on := next((name for name in sorted(others) if fields.raw[name]), None):
        raise fields.unsupported(on)
    begun = fields.get("init_lora_weights", True)
    if begun in _BEGUN_PLAIN:
        return ""
    if begun not in EXCHANGED:
        raise UnsupportedModel(
            f"{fields.origin}: init_lora_weights = {begun!r} changes the model's own matrices in a way that is not "
            "known here: save the adapter with path_initial_model_for_weight_conversion, which makes it plain LoRA"
        )
    return str(begun)


def replaced(weight: torch.Tensor, exchanged: str, rank: int, scale: float) -> torch.Tensor:
    """[out, in] the part of a matrix that a product of this rank took the place of before it was trained."""
    if exchanged == "pissa":
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        return (left[:, :rank] * sizes[:rank]) @ right[:rank]
    first, second = torch.linalg.qr(weight)
    return scale * first[:, :rank] @ second[:rank]
