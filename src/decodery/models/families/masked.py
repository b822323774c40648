"""Checkpoints of masked diffusion models: a table of what they add to a known family, and LLaDA's own names.

Their blocks are those of families that are known. What differs is which rows see each other, which token stands for
what is not written yet, and, in models that were made from autoregressive ones, that the row of a token may predict the
next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import HEADS, TOKEN_ID, WIDTH
from ..loaders.fields import Fields, Flag, Kind, Text, Whole


@dataclass(frozen=True)
class Masked:
    """What a family of masked diffusion models adds to the family that its blocks are.

    Attributes:
        like: That family.
        mask: Id of the mask token in the released models, for configurations that name none.
        shifted: The row of a token predicts the token after it.
        block_field: The field that names the block length, "" where all rows see each other.
        block: The block length where that field is missing.
    """

    like: str
    mask: int | None = None
    shifted: bool = False
    block_field: str = ""
    block: int | None = None


MASKED: dict[str, Masked] = {
    "llada": Masked("llama"),
    "llada_moe": Masked("qwen3", mask=156_895),
    "llada2_moe": Masked("llama", mask=156_895, block_field="block_length", block=32),
    "Dream": Masked("qwen2", shifted=True),
    "sdar": Masked("qwen3", block_field="block_size", block=4),
    "sdar_moe": Masked("qwen3", block_field="block_size", block=4),
    "Fast_dLLM_Qwen": Masked("qwen2", mask=151_665, shifted=True, block_field="bd_size", block=32),
    "rnd1": Masked("qwen3", mask=151_669, shifted=True),
    "a2d-llama": Masked("llama"),
    "a2d-qwen2": Masked("qwen2"),
    "a2d-qwen3": Masked("qwen3"),
}
"""By model_type."""

ARCHITECTURES = (
    *("LLaDAModelLM", "LLaDAMoEModelLM", "LLaDAMoEModel", "LLaDA2MoeModelLM", "DreamModel", "SDARMoeModelLM"),
    *("RND1LM", "Fast_dLLM_QwenForCausalLM"),
)
"""What some of them call a model with a head."""

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
"""Special tokens that end an answer, of which configurations name the end of texts alone."""

BLOCK = Whole(1, 1 << 16)
_BLOCKS = ("block_size", "bd_size", "block_length")
FIELDS: dict[str, Kind] = {
    "mask_token_id": TOKEN_ID,
    **dict.fromkeys(_BLOCKS, BLOCK),
    # The released code sees in both directions whatever it says, and counts passes by its caller's setting.
    **dict.fromkeys(("is_causal",), Flag()),
    "num_diffusion_steps": Whole(1, 1 << 20),
    "moe_backend": Text(64),
}


def of_config(fields: Fields, family: str, vocabulary: int) -> dict[str, Any]:
    """Masks, shifts and blocks of a family and a configuration, as fields of `ModelConfig`."""
    own = MASKED[family]
    for name in _BLOCKS:
        if name != own.block_field and fields.get(name):
            raise fields.unsupported(name)
    known = own.mask if own.mask is not None and own.mask < vocabulary else None
    return {
        "causal": False,
        "mask_id": fields.get("mask_token_id", known),
        "shifted": own.shifted,
        "block_length": fields.get(own.block_field, own.block) if own.block_field else None,
    }


def without_false(raw: dict[str, Any]) -> dict[str, Any]:
    """A configuration less the sizes that are written as false where there are none, as RND1's are."""
    return {name: value for name, value in raw.items() if value is not False or name not in _FALSE}


_FALSE = ("rope_scaling", "sliding_window")

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
