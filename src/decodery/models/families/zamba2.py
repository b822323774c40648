"""Checkpoints of Zamba2: Mamba-2 layers, some of which read what a shared block of attention and MLP finds first."""

from __future__ import annotations

from typing import Any

from decodery.core.errors import CorruptFile

from ..config import (
    EPS,
    HEAD_DIM,
    HEADS,
    KERNEL,
    LAYERS,
    MOST_LAYERS,
    POSITIONS,
    WIDTH,
    Mamba,
    ModelConfig,
    Rope,
    Shared,
)
from ..loaders.fields import Fields, Flag, Kind, Listed, Number, Text, Whole
from .mamba_fields import MIXER

_EPS = 1e-5
"""Of the norms of what mixers say, whatever the others have."""
_LONG = 16_384
"""Positions where `use_long_context` is set."""
_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("n_mamba_heads", "mamba_ngroups", "num_attention_heads", "num_key_value_heads"), HEADS),
    "mamba_d_state": HEAD_DIM,
    "mamba_d_conv": KERNEL,
    "mamba_expand": Number(0.01, 1024.0),
    "time_step_min": Number(0.0, 1e6),
    **dict.fromkeys(("hidden_size", "intermediate_size", "adapter_rank"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_mem_blocks"), LAYERS),
    **dict.fromkeys(
        ("add_bias_linear", "use_shared_attention_adapter", "use_mem_rope", "use_long_context", "tie_word_embeddings"),
        Flag(),
    ),
    "rms_norm_eps": EPS,
    "max_position_embeddings": POSITIONS,
    **dict.fromkeys(("layers_block_type", "layer_types"), Listed(Text(64), MOST_LAYERS)),
    "hybrid_layer_ids": Listed(Whole(0, MOST_LAYERS), MOST_LAYERS),
}
SAME = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("bos_token_id", "eos_token_id", "quantization_config", "rope_parameters", "rope_scaling", "rope_theta"),
)


def restated(raw: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `hybrids.hybrid`."""
    fields = Fields(raw, origin, FIELDS)
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    inner, states = int(fields.get("mamba_expand", 2) * hidden), fields.need("n_mamba_heads")
    if inner % states:
        raise CorruptFile(f"{origin}: {states} states do not fit a width of {inner}")
    # Where embedding and head are not one table, transformers does not share the blocks either.
    for name, wanted in (("add_bias_linear", False), ("rms_norm_eps", _EPS), ("tie_word_embeddings", True)):
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    groups, state = fields.get("mamba_ngroups", 1), fields.get("mamba_d_state", 64)
    least = fields.get("time_step_min", 0.001)
    mamba = Mamba(states, inner // states, groups, state, fields.get("mamba_d_conv", 4), least)
    head_dim = max(2 * hidden // heads, 1)
    attending = _attending(fields)
    own: dict[str, Any] = {
        "mamba": mamba,
        "state_layers": (True,) * len(attending),
        "attending_layers": attending,
        "shared": Shared(
            fields.get("num_mem_blocks", 1),
            fields.get("intermediate_size", 4 * hidden),
            fields.get("adapter_rank", 128),
            fields.get("use_shared_attention_adapter", False),
        ),
        "intermediate_size": 0,
        # Half of what a head reads is the embedding, which products of queries and keys do not count.
        "attention_scale": (head_dim / 2) ** -0.5,
    }
    if not fields.get("use_mem_rope", False):
        own["rope"] = Rope(kind="none")
    positions = _LONG if fields.get("use_long_context") else fields.get("max_position_embeddings", 4096)
    found = {name: raw[name] for name in SAME if name in raw}
    return found | {
        "num_key_value_heads": fields.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": own["shared"].inner,
        "rms_norm_eps": _EPS,
        "hidden_act": raw.get("hidden_act") or "gelu",
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }, own


def _attending(fields: Fields) -> tuple[bool, ...]:
    """Which layers read a shared block."""
    layers = fields.need("num_hidden_layers")
    kinds = fields.get("layers_block_type", fields.get("layer_types"))
    if kinds is None:
        places = fields.need("hybrid_layer_ids")
        return tuple(layer in places for layer in range(layers))
    if len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise CorruptFile(f"{fields.origin}: layers_block_type should name one of {', '.join(_KINDS)} for each layer")
    return tuple(_KINDS[kind] for kind in kinds)


_BLOCK = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "output": "self_attn.o_proj",
    "gate_up": "feed_forward.gate_up_proj",
    "down": "feed_forward.down_proj",
    **{part: f"self_attn.{part}_proj" for part in "qkv"},
}
_ADDED = {"gate_up": "feed_forward.gate_up_proj", **{part: f"self_attn.linear_{part}" for part in "qkv"}}


def tensor_name(name: str, layer: str | None, kind: str, config: ModelConfig) -> str | None:
    """See `hybrids.hybrid_name`."""
    if layer is None:
        return f"model.final_layernorm.{kind}" if name == "norm" else None
    prefix = f"model.layers.{layer}.{'mamba_decoder.' if int(layer) in config.sharing else ''}"
    return f"{prefix}mamba.{MIXER[name]}" if name in MIXER else f"{prefix}input_layernorm.{kind}"


def shared_name(path: str, kind: str, config: ModelConfig) -> str:
    """The tensor name of a part of a shared block, "shared.1.q", or of one of its uses, "uses.3.q_in".

    A block and all that layers add to it lie with the first layer that has it.
    """
    group, number, name = path.split(".")
    layers, turn = config.sharing, int(number)
    assert config.shared is not None
    if group == "uses" and name == "back":
        return f"model.layers.{layers[turn]}.linear.{kind}"
    prefix = f"model.layers.{layers[turn % config.shared.blocks]}.shared_transformer."
    if group == "shared":
        return f"{prefix}{_BLOCK[name]}.{kind}"
    part, side = name.rsplit("_", 1)
    return f"{prefix}{_ADDED[part]}_adapter_list.{turn}.{('in', 'out').index(side)}.{kind}"


def is_copy(name: str, config: ModelConfig) -> bool:
    """Whether a tensor repeats one of a shared block for another layer that has it."""
    layers, blocks = config.sharing, 0 if config.shared is None else config.shared.blocks
    return any(name.startswith(f"model.layers.{layer}.shared_transformer.") for layer in layers[blocks:])
