"""Checkpoints of masked diffusion models: LLaDA's, Dream's and SDAR's configurations, and LLaDA's tensor names.

Their blocks are those of families that are known: LLaDA's are Llama's under names of its own, Dream's are Qwen 2's and
SDAR's are Qwen 3's. What differs is which rows see each other, which token stands for what is not written yet, and,
in Dream, that the row of a token predicts the next one, as in the autoregressive model it was made from.
"""

from __future__ import annotations

from typing import Any

from .fields import Fields, Flag, Kind, Text, Whole

LIKE = {"llada": "llama", "Dream": "qwen2", "sdar": "qwen3"}
"""The family that a masked diffusion model's blocks are built as, by its model_type."""

ARCHITECTURES = ("LLaDAModelLM", "DreamModel")
"""What two of them call a model with a head."""

BLOCK = Whole(1, 1 << 16)

_SAME = {
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
_WANTED: dict[str, tuple[Kind, Any]] = {
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


def as_llama(raw: Any, origin: str) -> dict[str, Any]:
    """LLaDA's configuration in Llama's names. Raises UnsupportedModel for what Llama's blocks do not do."""
    kinds = {name: kind for name, (kind, _) in _WANTED.items()}
    fields = Fields(raw, origin, kinds | {"embedding_size": Whole(1, 1 << 24), "vocab_size": Whole(1, 1 << 24)})
    for name, (_, wanted) in _WANTED.items():
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    found = {ours: raw[theirs] for theirs, ours in _SAME.items() if theirs in raw}
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
    """What LLaDA's checkpoints call `part`, as in "layers.3.q.weight" -> "model.transformer.blocks.3.q_proj.weight"."""
    path, kind = part.rsplit(".", 1)
    if path in LLADA_HEAD:
        return f"model.transformer.{LLADA_HEAD[path]}.{kind}"
    _, layer, name = path.split(".")
    return f"model.transformer.blocks.{layer}.{LLADA_LAYER[name]}.{kind}"
