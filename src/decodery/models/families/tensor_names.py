"""What the checkpoints of each family call the parts of a model."""

from __future__ import annotations

from ..config import ModelConfig
from ..torch.latent import LATENTS, latent_name
from . import zamba2
from .arranged import FUSED
from .gated_rows import GATED
from .hybrids import HYBRIDS, hybrid_name
from .layouts import LAYOUTS, layout_name
from .masked import llada_name
from .mixed import STACKED, stacked_name
from .switched import SWITCHED, switched_name

_HEAD = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_SANDWICH_GLM = {"post_attention_norm": "post_self_attn_layernorm", "post_mlp_norm": "post_mlp_layernorm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


_MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}


def tensor_name(part: str, config: ModelConfig) -> str:
    """The tensor name of `part`: "layers.3.q.weight" is "model.layers.3.self_attn.q_proj.weight"."""
    if config.family == "llada":
        return llada_name(part)
    path, kind = part.rsplit(".", 1)
    if path.startswith(("shared.", "uses.")):
        return zamba2.shared_name(path, kind, config)
    others = (LAYOUTS, layout_name), (HYBRIDS, hybrid_name), (LATENTS, latent_name), (SWITCHED, switched_name)
    for families, named in others:
        if config.family not in families:
            continue
        place = path.split(".", 2)
        name, number = (path, None) if len(place) < 3 else (place[2], place[1])
        if (found := named(name, number, kind, config)) is not None:
            return found
    if path in _HEAD:
        return f"{_HEAD[path]}.{kind}"
    _, layer, name = path.split(".", 2)
    if config.family in STACKED and name.startswith("experts."):
        return f"model.layers.{layer}.{stacked_name(f'{name}.{kind}', config.family)}"
    if config.experts and name.startswith(("router", "experts.")):
        return f"model.layers.{layer}.{_expert_name(name, config.family)}.{kind}"
    fused = FUSED.get(config.family, {})
    if config.sandwich_norms:
        fused = fused | (_SANDWICH_GLM if config.family == "glm4" else _SANDWICH)
    inner = fused.get(name) or _LAYER[name]
    return f"model.layers.{layer}.{inner}.{kind}"


def _expert_name(name: str, family: str) -> str:
    """What a checkpoint calls a layer's router, or a part of an expert such as "experts.3.gate"."""
    mixtral = family == "mixtral"
    if name == "router":
        return "block_sparse_moe.gate" if mixtral else "mlp.gate"
    _, number, part = name.split(".")
    if mixtral:
        return f"block_sparse_moe.experts.{number}.{_MIXTRAL[part]}"
    return f"mlp.experts.{number}.{part}_proj"


def stores_less_one(norm: str, config: ModelConfig) -> bool:
    """Whether the checkpoint's weights w of a norm are w - 1, as Gemma's are; those of states are not."""
    return not norm.endswith("gate_norm.weight") and config.family in ("gemma", "gemma2", "gemma3_text", *GATED)


_COMPUTED_WIDE = ("decay", "step_bias", "skip", "choice_bias")
"""Vectors that are read in float32 at least, whatever a model's precision."""


def kept_wide(part: str, config: ModelConfig) -> bool:
    """Whether a part stays in float32 in a model of 16 bits.

    Rounding what the loader has changed would lose some of it.
    """
    scaled = part == "norm.weight" and config.family.startswith(("granite", "falcon_h1"))
    changed = part.endswith("norm.weight") and stores_less_one(part, config)
    return scaled or changed or part.split(".")[-2] in _COMPUTED_WIDE


def is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to next-token layers, which the drafter `mtp` runs, of a model of `layers`."""
    if name.startswith(("mtp.", "model.mtp_layers.")):
        return True
    place = name.split(".")
    return name.startswith("model.layers.") and len(place) > 2 and place[2].isdigit() and int(place[2]) >= layers
