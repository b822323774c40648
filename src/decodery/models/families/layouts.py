"""Families whose blocks differ from Llama's: OLMo 2, StableLM, GPT-NeoX and GPT-2.

Their configurations are restated in Llama's names, and what is left is a handful of switches of `ModelConfig`: norms
that take the mean away, norms after sublayers, attention and MLP side by side, MLPs without a gate, learned positions.
"""

from __future__ import annotations

from typing import Any

from ..config import EPS, HEADS, LAYERS, POSITIONS, THETA, WIDTH, ModelConfig, Rope
from ..loaders.fields import Fields, Flag, Kind, Number, Text, Whole

LAYOUTS = ("olmo2", "stablelm", "gpt_neox", "gpt2")

_NAMES: dict[str, dict[str, str]] = {
    "stablelm": {"layer_norm_eps": "rms_norm_eps"},
    "gpt_neox": {"layer_norm_eps": "rms_norm_eps", "rotary_emb_base": "rope_theta"},
    "gpt2": {
        "layer_norm_epsilon": "rms_norm_eps",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
    },
}
"""By family, what others call a field of its configuration."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "olmo2": {"rms_norm_eps": 1e-5},
    "stablelm": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "gpt_neox": {"rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True},
    "gpt2": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "hidden_act": "gelu_new",
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
SWITCHES: dict[str, Kind] = {
    "use_parallel_residual": Flag(),
    "use_qkv_bias": Flag(),
    "qk_layernorm": Flag(),
    "rotary_pct": Number(0.0, 1.0),
    "scale_attn_weights": Flag(),
    "scale_attn_by_inverse_layer_idx": Flag(),
    "n_inner": WIDTH,
    "hidden_size": WIDTH,
    "n_embd": WIDTH,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": POSITIONS,
    "rotary_emb_base": THETA,
    "layer_norm_eps": EPS,
    "layer_norm_epsilon": EPS,
    "activation_function": Text(64),
    "intermediate_size": Whole(1, WIDTH.most),
}


def restated(raw: dict[str, Any], family: str, origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration in Llama's names, and further fields of `ModelConfig`.

    Raises:
        UnsupportedModel: For what is not in the forward pass.
    """
    fields = Fields(raw, origin, SWITCHES)
    for name, wanted in (
        ("qk_layernorm", False),
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
    ):
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    names = _NAMES.get(family, {})
    found = _DEFAULTS[family] | {names.get(name, name): value for name, value in raw.items() if value is not None}
    if family == "olmo2":
        return found, {"norms_after": True, "qk_norm": True, "wide_qk_norm": True}
    if family == "stablelm":
        side, bias = fields.get("use_parallel_residual", False), fields.get("use_qkv_bias", False)
        return found, {"centred_norms": True, "parallel": side, "qkv_bias": bias}
    bias = found["attention_bias"]
    found |= {"num_key_value_heads": found.get("num_attention_heads")}
    own = {"centred_norms": True, "gated": False, "mlp_bias": True, "qkv_bias": bias, "output_bias": bias}
    if family == "gpt_neox":
        if "rotary_pct" in raw:
            found.setdefault("partial_rotary_factor", fields.get("rotary_pct"))
        return found, own | {"parallel": fields.get("use_parallel_residual", True)}
    found["intermediate_size"] = fields.get("n_inner") or 4 * found["hidden_size"]
    return found, own | {"learned_positions": True, "rope": Rope(kind="none")}


TURNED = {
    "stablelm": 0.25,
    "gpt_neox": 0.25,
    "bamba": 0.5,
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "phi"), 0.5),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 0.25),
}
"""Families that turn a part of every head, and how much of it where their configuration does not say."""
HEADS_OF = {
    "gpt_neox": {"embedding": "embed_in", "norm": "final_layer_norm", "head": "embed_out"},
    "gpt2": {"embedding": "wte", "positions": "wpe", "norm": "ln_f", "head": "lm_head"},
}
LAYERS_OF: dict[str, dict[str, str]] = {
    "olmo2": {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "stablelm": {},
    "gpt_neox": {
        **dict.fromkeys(("q", "k", "v"), "attention.query_key_value"),
        "output": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    "gpt2": {
        "attention_norm": "ln_1",
        **dict.fromkeys(("q", "k", "v"), "attn.c_attn"),
        "output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
}
"""What checkpoints call the parts of a model, and those of a layer, where they do not call them as Llama's do."""
SIGHT = tuple(
    f"{prefix}{name}"
    for prefix in ("", "model.")
    for name in (
        *("vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline", "visual."),
        *("audio_tower.", "embed_vision.", "embed_audio."),
    )
)
"""What those begin with that make embeddings of images and sounds, beside a language model that reads them."""


def layout_name(name: str, layer: str | None, kind: str, config: ModelConfig) -> str | None:
    """What these families call a part of layer number `layer`, or of the whole model.

    None: what Llama's call it.
    """
    family = config.family
    if layer is None:
        inner = HEADS_OF.get(family, {}).get(name)
        if inner is None or name == "head":
            return inner and f"{inner}.{kind}"
        return f"{'gpt_neox' if family == 'gpt_neox' else 'transformer'}.{inner}.{kind}"
    inner = LAYERS_OF.get(family, {}).get(name)
    if family == "stablelm" and config.parallel and name == "mlp_norm":
        # Attention and MLP read the same normed rows.
        inner = "input_layernorm"
    if family == "gpt_neox":
        inner = inner or {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}[name]
        return f"gpt_neox.layers.{layer}.{inner}.{kind}"
    if family == "gpt2":
        return f"transformer.h.{layer}.{inner}.{kind}"
    return inner and f"model.layers.{layer}.{inner}.{kind}"


def other_names(name: str) -> tuple[str, ...]:
    """What some checkpoints call the tensor `name` in its place."""
    others = {"embed_out.weight": "lm_head.weight", "backbone.embeddings.weight": "backbone.embedding.weight"}
    if name in others:
        return (others[name],)
    if name.startswith("transformer."):
        return (name.removeprefix("transformer."),)
    within = (name.replace("model.", "model.language_model.", 1),) if name.startswith("model.") else ()
    return (f"language_model.{name}", *within)
