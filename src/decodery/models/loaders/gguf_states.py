"""GGUF files of Mamba, Falcon-Mamba, Mamba-2 and Falcon-H1, as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from typing import Any

import torch

from decodery.core.errors import CorruptFile

from ..config import HEAD_DIM, HEADS, KERNEL, WIDTH, ModelConfig
from ..families.config_json import read_config
from .fields import Fields, Flag, Kind

KINDS: dict[str, Kind] = {
    "ssm.time_step_rank": WIDTH,
    "ssm.group_count": HEADS,
    "ssm.dt_b_c_rms": Flag(),
    "ssm.inner_size": WIDTH,
    "ssm.state_size": HEAD_DIM,
    "ssm.conv_kernel": KERNEL,
}
STATES = {"mamba": "mamba", "mamba2": "mamba2", "falcon-h1": "falcon_h1"}
"""Architectures that have recurrent layers, and their families here; files of Falcon-Mamba are called Mamba's."""
PURE = ("mamba", "mamba2")
"""Architectures without heads and MLPs, which files say by zeros."""
_ENDS = {
    **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), ("qkv.weight", "output.weight")),
    "falcon_h1": ("mix_in.weight", "mix_out.weight"),
}
FAMILIES = tuple(_ENDS)
_NAMES = {
    "select_in.weight": "ssm_x.weight",
    "select_out.weight": "ssm_dt.weight",
    "conv.weight": "ssm_conv1d.weight",
    "conv_bias.weight": "ssm_conv1d.bias",
    "step_bias.weight": "ssm_dt.bias",
    "decay.weight": "ssm_a",
    "skip.weight": "ssm_d",
    "gate_norm.weight": "ssm_norm.weight",
}
"""What a file calls the parts of a recurrent layer that are no matrices."""
_FLAT = ("decay.weight", "skip.weight", "gate_norm.weight")


def state_name(part: str, family: str) -> str | None:
    """What a file calls a part of a layer that its state has, such as "conv.weight".

    None where it is another's.
    """
    if part == "mlp_norm.weight" and family == "falcon_h1":
        # llama.cpp writes and reads this norm of Falcon-H1 without an ending.
        return "ffn_norm"
    return dict(zip(_ENDS[family], ("ssm_in.weight", "ssm_out.weight"), strict=True)).get(part) or _NAMES.get(part)


def states_config(fields: Fields, family: str, vocab_size: int, tied: bool, normed: bool) -> ModelConfig:
    """The configuration of such a file.

    Args:
        fields: Its metadata, whose names are those after the architecture's.
        normed: Whether what states say is normed.
    """
    inner, heads = fields.need("ssm.inner_size"), fields.need("ssm.time_step_rank")
    if family != "mamba" and inner % heads:
        raise CorruptFile(f"{fields.origin}: {heads} states do not fit {inner} inner units")
    raw: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": fields.need("embedding_length"),
        "num_hidden_layers": fields.need("block_count"),
        "tie_word_embeddings": tied,
    }
    own = {"mamba": _mamba, "mamba2": _mamba2, "falcon_h1": _falcon_h1}[family]
    return read_config(raw | own(fields, inner, heads, raw["hidden_size"], normed), fields.origin)


def _mamba(fields: Fields, inner: int, rank: int, hidden: int, normed: bool) -> dict[str, Any]:
    return {
        # The file does not say by what steps are normed: the family's own default.
        **({"model_type": "falcon_mamba"} if fields.get("ssm.dt_b_c_rms", False) else {}),
        "intermediate_size": inner,
        "time_step_rank": rank,
        "state_size": fields.need("ssm.state_size"),
        "conv_kernel": fields.need("ssm.conv_kernel"),
        "layer_norm_epsilon": fields.need("attention.layer_norm_rms_epsilon"),
    }


def _mamba2(fields: Fields, inner: int, heads: int, hidden: int, normed: bool) -> dict[str, Any]:
    return {
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": fields.get("ssm.group_count", 1),
        "state_size": fields.need("ssm.state_size"),
        "conv_kernel": fields.need("ssm.conv_kernel"),
        # Rounded down when it is used.
        "expand": (inner + 0.5) / hidden,
        "layer_norm_epsilon": fields.need("attention.layer_norm_rms_epsilon"),
    }


def _falcon_h1(fields: Fields, inner: int, heads: int, hidden: int, normed: bool) -> dict[str, Any]:
    """Without the factors of a configuration, which the converter has multiplied into weights."""
    attending = fields.need("attention.head_count")
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_n_groups": fields.get("ssm.group_count", 1),
        "mamba_d_state": fields.need("ssm.state_size"),
        "mamba_d_conv": fields.need("ssm.conv_kernel"),
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,
        "intermediate_size": fields.need("feed_forward_length"),
        "num_attention_heads": attending,
        "num_key_value_heads": fields.get("attention.head_count_kv", attending),
        "head_dim": fields.get("attention.key_length", max(hidden // attending, 1)),
        "max_position_embeddings": fields.need("context_length"),
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
    }


def flat_part(name: str) -> bool:
    """Whether a part such as "layers.3.decay.weight" is a vector that files have in two dimensions."""
    return name.split(".", 2)[-1] in _FLAT


def held_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of such a part here; decays of Mamba-1 are a matrix, as their channels decay apart."""
    whole = name.endswith("decay.weight") and config.selective is not None
    return shape if whole else (math.prod(shape),)


def vector(name: str, stored: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Such a part, from what the file has of it: of decays a, not the logarithm of -a."""
    held = stored.float().reshape(held_shape(name, tuple(stored.shape), config))
    if not name.endswith("decay.weight"):
        return held
    if not bool((held < 0).all()):
        raise CorruptFile(f"{name}: states that grow have decays of 0 or more: the file is damaged")
    return (-held).log()
