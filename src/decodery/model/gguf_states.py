"""GGUF files of Mamba-2, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CorruptFile
from .config import HEAD_DIM, HEADS, KERNEL, WIDTH, ModelConfig
from .families import read_config
from .fields import Fields, Kind

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("ssm.time_step_rank", "ssm.group_count"), HEADS),
    "ssm.inner_size": WIDTH,
    "ssm.state_size": HEAD_DIM,
    "ssm.conv_kernel": KERNEL,
}
NAMES = {
    "qkv.weight": "ssm_in.weight",
    "output.weight": "ssm_out.weight",
    "conv.weight": "ssm_conv1d.weight",
    "conv_bias.weight": "ssm_conv1d.bias",
    "step_bias.weight": "ssm_dt.bias",
    "decay.weight": "ssm_a",
    "skip.weight": "ssm_d",
    "gate_norm.weight": "ssm_norm.weight",
}
"""What a file calls the parts of a recurrent layer."""
_FLAT = ("decay.weight", "skip.weight", "gate_norm.weight")


def states_config(fields: Fields, vocab_size: int, tied: bool) -> ModelConfig:
    """The configuration of such a file. fields: its metadata, whose names are those behind "mamba2."."""
    inner, heads, hidden = (
        fields.need("ssm.inner_size"),
        fields.need("ssm.time_step_rank"),
        fields.need("embedding_length"),
    )
    if inner % heads:
        raise CorruptFile(f"{fields.origin}: {heads} states do not fit {inner} inner units")
    raw: dict[str, Any] = {
        "model_type": "mamba2",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": fields.need("block_count"),
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": fields.get("ssm.group_count", 1),
        "state_size": fields.need("ssm.state_size"),
        "conv_kernel": fields.need("ssm.conv_kernel"),
        # Rounded down when it is used.
        "expand": (inner + 0.5) / hidden,
        "layer_norm_epsilon": fields.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": tied,
    }
    return read_config(raw, fields.origin)


def flat_part(name: str) -> bool:
    """Whether a part such as "layers.3.decay.weight" is a vector that files have in two dimensions."""
    return name.split(".", 2)[-1] in _FLAT


def vector(name: str, stored: torch.Tensor) -> torch.Tensor:
    """Such a part, from what the file has of it: of decays a, not the logarithm of -a."""
    flat = stored.float().flatten()
    if not name.endswith("decay.weight"):
        return flat
    if not bool((flat < 0).all()):
        raise CorruptFile(f"{name}: states that grow have decays of 0 or more: the file is damaged")
    return (-flat).log()
