"""Checkpoints of Falcon-H1: every layer attends and keeps a Mamba-2 state side by side, and then has an MLP.

What the configuration multiplies on the way is multiplied into weights where they are read.
"""

from __future__ import annotations

from typing import Any

import torch

from decodery.core.errors import CorruptFile

from ..config import HEAD_DIM, HEADS, KERNEL, LAYERS, WIDTH, Mamba, ModelConfig
from ..loaders.fields import Fields, Flag, Kind, Listed, Number
from .family import silu_alone
from .mamba_fields import MIXER, limits

_FACTOR = Number(-1e6, 1e6)
_OFF = ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")
_SINGLE = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups"), HEADS),
    "mamba_d_state": HEAD_DIM,
    "mamba_d_conv": KERNEL,
    "mamba_expand": Number(0.01, 1024.0),
    **dict.fromkeys(("mamba_d_ssm", "hidden_size"), WIDTH),
    "num_hidden_layers": LAYERS,
    **dict.fromkeys((*_OFF, "mamba_conv_bias", "mamba_rms_norm", "mamba_norm_before_gate"), Flag()),
    **dict.fromkeys(_SINGLE, _FACTOR),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers"), Listed(_FACTOR, 5)),
}


def restated(raw: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `hybrids.hybrid`."""
    fields = Fields(raw, origin, FIELDS)
    for name, wanted in (*dict.fromkeys(_OFF, False).items(), ("mamba_conv_bias", True)):
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    silu_alone(fields, raw)
    normed = fields.get("mamba_rms_norm", False)
    if normed and fields.get("mamba_norm_before_gate", True):
        raise fields.unsupported("mamba_norm_before_gate")
    heads, layers = fields.need("mamba_n_heads"), fields.need("num_hidden_layers")
    inner = fields.get("mamba_d_ssm", int(fields.get("mamba_expand", 2) * fields.need("hidden_size")))
    if inner % heads:
        raise CorruptFile(f"{origin}: {heads} states do not fit a width of {inner}")
    shape = (inner // heads, fields.get("mamba_n_groups", 1), fields.need("mamba_d_state"))
    mamba = Mamba(heads, *shape, fields.get("mamba_d_conv", 4), *limits(raw.get("time_step_limit"), origin), normed)
    _check(fields)
    found = {name: value for name, value in raw.items() if name not in ("layer_types", "layers_block_type")}
    return found | {"rms_norm_eps": raw.get("rms_norm_eps", 1e-5)}, {
        "mamba": mamba,
        "state_layers": (True,) * layers,
        "attending_layers": (True,) * layers,
        "embedding_scale": fields.get("embedding_multiplier", 1.0),
    }


def _check(fields: Fields) -> None:
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if len(fields.get(name, [1.0] * count)) != count:
            raise CorruptFile(f"{fields.origin}: {name} should be {count} numbers")


def factors(raw: dict[str, Any], config: ModelConfig, origin: str) -> dict[str, float | torch.Tensor]:
    """By part of a layer, or of the whole model, what its weights are multiplied by.

    [rows] where rows differ.
    """
    fields = Fields(raw, origin, FIELDS)
    key, enters, leaves, state_in, state_out, logits = (
        fields.get(f"{name}_multiplier", 1.0)
        for name in ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "lm_head")
    )
    gate, down = fields.get("mlp_multipliers", [1.0] * 2)
    mamba = config.mamba
    assert mamba is not None
    led = mamba.groups * mamba.state
    sizes = torch.tensor((mamba.inner, mamba.inner, led, led, mamba.heads), dtype=torch.int64, device="cpu")
    mixed = (
        torch.tensor(fields.get("ssm_multipliers", [1.0] * 5), dtype=torch.float32, device="cpu").repeat_interleave(
            sizes
        )
        * state_in
    )
    return {
        **{"q": enters, "k": enters * key, "v": enters, "output": leaves},
        **{"mix_in": mixed, "mix_out": state_out, "gate": gate, "down": down},
        # Before the head, whose table may be the embeddings' too.
        "norm": logits,
    }


_OWN = {"mlp_norm": "pre_ff_layernorm", **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}}
_BOTH = {"mix_in": MIXER["qkv"], "mix_out": MIXER["output"]}


def tensor_name(name: str, layer: str | None, kind: str, config: ModelConfig) -> str | None:
    """See `hybrids.hybrid_name`."""
    if layer is None:
        return f"model.final_layernorm.{kind}" if name == "norm" else None
    mixer = _BOTH | {part: inner for part, inner in MIXER.items() if part not in ("qkv", "output")}
    if name in mixer:
        return f"model.layers.{layer}.mamba.{mixer[name]}"
    return f"model.layers.{layer}.{_OWN[name]}.{kind}" if name in _OWN else None
