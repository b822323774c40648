"""Checkpoints with Mamba-2 layers: Mamba-2 itself, which has nothing else, and Bamba, with attention and MLPs.

As with other layouts, a configuration is restated in Llama's names, and the recurrent layers are what is left. Zamba2
and Falcon-H1, whose layers both attend and keep a state, have files of their own.
"""

from __future__ import annotations

from typing import Any

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import EPS, HEAD_DIM, HEADS, KERNEL, LAYERS, MOST_LAYERS, WIDTH, Mamba, ModelConfig
from ..loaders.fields import Anything, Either, Fields, Flag, Kind, Listed, Number, Text, Whole
from . import falcon_h1, zamba2
from .mamba_fields import MIXER, limits

HYBRIDS = ("mamba2", "bamba", "zamba2", "falcon_h1")
_OTHERS = {"zamba2": zamba2, "falcon_h1": falcon_h1}

_ENDLESS = 1 << 20
"""Positions of a model that has none; no state grows with them."""
_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("num_heads", "mamba_n_heads", "n_groups", "mamba_n_groups"), HEADS),
    **dict.fromkeys(("head_dim", "state_size", "mamba_d_state"), HEAD_DIM),
    "mamba_d_head": Either(HEAD_DIM, Text(64)),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv"), KERNEL),
    **dict.fromkeys(("use_bias", "use_conv_bias", "mamba_proj_bias", "mamba_conv_bias"), Flag()),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "expand": Number(0.01, 1024.0),
    "mamba_expand": Number(0.01, 1024.0),
    "layer_norm_epsilon": EPS,
    "hidden_act": Text(64),
    "time_step_limit": Anything(),
    "attn_layer_indices": Listed(Whole(0, MOST_LAYERS), MOST_LAYERS),
    "layer_types": Listed(Text(64), MOST_LAYERS),
    "layers_block_type": Either(Listed(Text(64), MOST_LAYERS)),
}


def hybrid(raw: dict[str, Any], family: str, origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration in Llama's names, and further fields of `ModelConfig`."""
    if family in _OTHERS:
        return _OTHERS[family].restated(raw, origin)
    fields = Fields(raw, origin, FIELDS)
    pure = family == "mamba2"
    names = (
        ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
        if pure
        else ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    )
    least, most = limits(raw.get("time_step_limit"), origin)
    heads, head_dim, groups, state, kernel = (fields.need(name) for name in names)
    hidden, layers = fields.need("hidden_size"), fields.need("num_hidden_layers")
    inner = int(fields.get("expand" if pure else "mamba_expand", 2) * hidden)
    if head_dim == "auto":
        head_dim = inner // heads
    HEAD_DIM.check(head_dim, f"{origin}: {names[1]}")
    mamba = Mamba(heads, head_dim, groups, state, kernel, least, most)
    if inner != mamba.inner:
        raise CorruptFile(f"{origin}: {mamba.heads} states of {mamba.head_dim} do not fit a width of {hidden}")
    for name, wanted in (
        ("use_bias", False),
        ("mamba_proj_bias", False),
        ("use_conv_bias", True),
        ("mamba_conv_bias", True),
        ("hidden_act", "silu"),
    ):
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    if not pure:
        found = {name: value for name, value in raw.items() if name not in ("layer_types", "layers_block_type")}
        return found | {"rms_norm_eps": raw.get("rms_norm_eps", 1e-5)}, {
            "mamba": mamba,
            "state_layers": _layers(fields, layers),
        }
    # A cache of this shape has room for what is kept of a row.
    room = -(-mamba.width // 4) * 2
    if room > HEAD_DIM.most:
        raise UnsupportedModel(f"{origin}: {mamba.heads} states of {mamba.head_dim} are more than there is room for")
    found = {name: raw[name] for name in SAME if name in raw}
    one = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": room}
    sizes = {"intermediate_size": 1, "max_position_embeddings": _ENDLESS}
    eps = {"rms_norm_eps": fields.get("layer_norm_epsilon", 1e-5)}
    return found | one | sizes | eps, {"mamba": mamba, "state_layers": (True,) * layers, "intermediate_size": 0}


SAME = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "quantization_config", "hidden_act"),
)


def _layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers are recurrent."""
    kinds = fields.get("layer_types", fields.get("layers_block_type"))
    if kinds is not None:
        if len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
            raise CorruptFile(f"{fields.origin}: layer_types should name one of {', '.join(_KINDS)} for each layer")
        return tuple(_KINDS[kind] for kind in kinds)
    attends = fields.get("attn_layer_indices", [])
    return tuple(layer not in attends for layer in range(layers))


_BAMBA = {"mlp_norm": "pre_ff_layernorm", **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}}
_PURE = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}


def hybrid_name(name: str, layer: str | None, kind: str, config: ModelConfig) -> str | None:
    """What these families call a part of layer number `layer`, or of the whole model.

    None: what Llama's call it.
    """
    if config.family in _OTHERS:
        return _OTHERS[config.family].tensor_name(name, layer, kind, config)
    pure = config.family == "mamba2"
    if layer is None:
        if pure:
            return f"{_PURE[name]}.{kind}"
        return f"model.final_layernorm.{kind}" if name == "norm" else None
    if name in MIXER and config.recurrent(int(layer)):
        return f"backbone.layers.{layer}.mixer.{MIXER[name]}" if pure else f"model.layers.{layer}.mamba.{MIXER[name]}"
    if pure:
        return f"backbone.layers.{layer}.norm.{kind}"
    return f"model.layers.{layer}.{_BAMBA[name]}.{kind}" if name in _BAMBA else None
