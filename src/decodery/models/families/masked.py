"""Checkpoints of masked diffusion models: LLaDA's, Dream's and SDAR's configurations, and LLaDA's tensor names.

Their blocks are those of families that are known: LLaDA's are Llama's under names of its own, LLaDA-MoE's are Qwen
3-MoE's, Dream's are Qwen 2's and SDAR's are Qwen 3's. What differs is which rows see each other, which token stands for
what is not written yet, and, in Dream, that the row of a token predicts the next one, as in the autoregressive model it
was made from.
"""

from __future__ import annotations

from typing import Any

from ..config import HEADS, WIDTH
from ..loaders.fields import Fields, Flag, Kind, Text, Whole

LIKE = {"llada": "llama", "llada_moe": "qwen3", "Dream": "qwen2", "sdar": "qwen3"}
"""The family that a masked diffusion model's blocks are built as, by its model_type."""

ARCHITECTURES = ("LLaDAModelLM", "LLaDAMoEModelLM", "LLaDAMoEModel", "DreamModel")
"""What some of them call a model with a head."""

BLOCK = Whole(1, 1 << 16)

SAME = {
    "d_model": "hidden_size",
    "mlp_hidden_size": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "activation_type": "hidden_act",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "architectures": "architectures",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "mask_token_id": "mask_token_id",
    "quantization_config": "quantization_config",
}
"""LLaDA's names of what other configurations have too."""
WANTED: dict[str, tuple[Kind, Any]] = {
    "block_type": (Text(64), "llama"),
    "layer_norm_type": (Text(64), "rms"),
    "rope": (Flag(), True),
    "alibi": (Flag(), False),
    "attention_layer_norm": (Flag(), False),
    "input_emb_norm": (Flag(), False),
    "include_bias": (Flag(), False),
    "include_qkv_bias": (Flag(), False),
    "scale_logits": (Flag(), False),
    "multi_query_attention": (Flag(), False),
}
"""Switches of LLaDA's configuration, and where they must stand: nothing else is in the forward pass."""


MOE: dict[str, tuple[Kind, Any]] = {
    "qk_layernorm": (Flag(), True),
    "moe_router_enable_expert_bias": (Flag(), False),
    "moe_router_score_function": (Text(64), "softmax"),
    "attention_bias": (Flag(), False),
}
"""Switches of LLaDA-MoE's configuration, and where they must stand. It names shared experts whose width is 0."""


MOE_SIZES = (
    *("expert_intermediate_size", "dense_intermediate_size", "shared_expert_intermediate_size"),
    *("num_shared_experts", "moe_layer_freq", "router_num_group", "router_topk_group", "n_group", "topk_group"),
)
"""Fields of LLaDA-MoE's configuration that say how wide its MLPs are, or what those that are not there would do."""
SIZES: dict[str, Kind] = {"embedding_size": Whole(1, 1 << 24), "vocab_size": Whole(1, 1 << 24)}
UNREAD = (
    *("alibi_bias_max", "attention_layer_norm_with_affine", "bias_for_layer_norm", "block_group_size"),
    *("init_cutoff_factor", "init_device", "init_fn", "init_std", "layer_norm_with_affine", "mlp_ratio"),
    *("precision", "rope_full_precision", "attention_dropout", "embedding_dropout", "residual_dropout"),
)
"""Fields of LLaDA's configuration that say nothing of a forward pass as `WANTED` has it."""


def is_moe(raw: Any) -> bool:
    """Whether a configuration is LLaDA-MoE's; released files call it llada like the dense model."""
    return isinstance(raw, dict) and raw.get("model_type") in ("llada", "llada_moe") and "num_experts" in raw


def as_qwen_moe(raw: Any, origin: str) -> dict[str, Any]:
    """LLaDA-MoE's configuration in Qwen3-MoE's names.

    Raises:
        UnsupportedModel: For what those blocks do not do.
    """
    sizes: dict[str, Kind] = {"hidden_size": WIDTH, "num_attention_heads": HEADS}
    fields = Fields(raw, origin, {name: kind for name, (kind, _) in MOE.items()} | sizes)
    for name, (_, wanted) in MOE.items():
        if fields.get(name, wanted) not in (wanted, None):
            raise fields.unsupported(name)
    if raw.get("shared_expert_intermediate_size"):
        raise fields.unsupported("shared_expert_intermediate_size")
    head_dim = fields.need("hidden_size") // fields.need("num_attention_heads")
    found = {"head_dim": head_dim, **raw, "model_type": "llada_moe", "norm_topk_prob": False}
    if "expert_intermediate_size" in raw:
        found["moe_intermediate_size"] = raw["expert_intermediate_size"]
    return found


def as_llama(raw: Any, origin: str) -> dict[str, Any]:
    """LLaDA's configuration in Llama's names.

    Raises:
        UnsupportedModel: For what Llama's blocks do not do.
    """
    kinds = {name: kind for name, (kind, _) in WANTED.items()}
    fields = Fields(raw, origin, kinds | SIZES)
    for name, (_, wanted) in WANTED.items():
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    found: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    found |= {ours: raw[theirs] for theirs, ours in SAME.items() if theirs in raw}
    # Tables may be longer than the vocabulary: every row of them is a token here.
    vocab = fields.get("embedding_size", fields.get("vocab_size"))
    return {**found, "model_type": "llada", "vocab_size": vocab}


LLADA_HEAD = {"embedding": "wte", "norm": "ln_f", "head": "ff_out"}
LLADA_LAYER = {
    "attention_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "output": "attn_out",
    "mlp_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
"""What LLaDA's checkpoints call the parts of a model, below "model.transformer"."""


def llada_name(part: str) -> str:
    """LLaDA's tensor name of `part`: "layers.3.q.weight" is "model.transformer.blocks.3.q_proj.weight"."""
    path, kind = part.rsplit(".", 1)
    if path in LLADA_HEAD:
        return f"model.transformer.{LLADA_HEAD[path]}.{kind}"
    _, layer, name = path.split(".")
    return f"model.transformer.blocks.{layer}.{LLADA_LAYER[name]}.{kind}"
