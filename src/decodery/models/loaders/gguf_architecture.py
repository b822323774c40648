"""How files of one architecture of llama.cpp are read, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import EXPERTS, HEAD_DIM, HEADS, KERNEL, LAYERS, MOST_STREAMS, SCALE, TOKENS, WIDTH
from .fields import Array, Either, Fields, Flag, Kind, Number, Whole
from .gguf_file import GGUFFile

Raw = dict[str, Any]
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
NORMED = {"expert_weights_norm": True}
"""Of architectures whose chosen experts' weights sum to 1, whether files say so or not."""
KINDS: dict[str, Kind] = {
    "attention.layer_norm_epsilon": Number(1e-20, 1.0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Number(0.0, 1e6)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), SCALE),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count"), EXPERTS),
    **dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"), WIDTH),
    "leading_dense_block_count": Whole(0, LAYERS.most),
    "expert_weights_norm": Flag(),
    "expert_gating_func": Whole(0, 16),
    **dict.fromkeys(("nextn_predict_layers", "interleave_moe_layer_step"), Whole(0, LAYERS.most)),
    "rope.scaling.finetuned": Flag(),
    "vocab_size": TOKENS,
    "attention.head_count_kv": Either(HEADS, Array(LAYERS.most)),
    "shortconv.l_cache": KERNEL,
    "full_attention_interval": LAYERS,
    "feed_forward_length": Either(WIDTH, Array(LAYERS.most)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), EXPERTS),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank"), Whole(0, WIDTH.most)),
    **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), HEAD_DIM),
    "attention.recurrent_layers": Array(LAYERS.most),
    "rope.dimension_sections": Array(4),
    "attention.shared_kv_layers": Whole(0, LAYERS.most),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), HEAD_DIM),
    "embedding_length_per_layer_input": Whole(0, WIDTH.most),
    "altup.num_inputs": Whole(2, MOST_STREAMS),
    "altup.active_idx": Whole(0, MOST_STREAMS),
    "activation_sparsity_scale": Array(LAYERS.most, finite=False),
}


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture of llama.cpp are read.

    Attributes:
        family: Of the family that runs them, its name in a config.json.
        paired: Rotated neighbours stand side by side.
        more: From the metadata and the file, what its config.json says beside sizes.
        parts: What a file calls the parts of a layer, where Llama's differ, but for their endings.
        exact: The same with their endings.
        convolving: Of a layer with a convolution in place of attention.
        recurrent: Of a layer with a state in place of attention, with their endings.
        in_turns: Groups of Gated DeltaNet layers take turns from head to head.
        norm: What it calls the last norm.
        theta: Base of the rotation of a file that has none.
        multiplied: YaRN's factor of queries and keys has a multiplier.
        unread: Keys that files have and that say nothing of this architecture, or are read of some files alone.
        fixed: Of keys that are not read, the values at which what they say is what is run.
        ropes: Whether `more` says how heads are turned and how many key-value heads each layer has.
    """

    family: str
    paired: bool = False
    more: Callable[[Fields, GGUFFile, Raw], Raw] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)
    convolving: Mapping[str, str] = field(default_factory=dict)
    recurrent: Mapping[str, str] = field(default_factory=dict)
    in_turns: bool = False
    norm: str = "output_norm"
    theta: float = 10_000.0
    multiplied: bool = False
    unread: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ropes: bool = False


def refuse_other_widths(fields: Fields, head_dim: int) -> None:
    """Refuse heads whose values, or whose rotated part, are of another width than their keys.

    Raises UnsupportedModel.
    """
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, head_dim) != head_dim:
            raise fields.unsupported(key)


def turned(fields: Fields, raw: Raw) -> Raw:
    """How much of a head is turned."""
    return {"partial_rotary_factor": fields.get("rope.dimension_count", raw["head_dim"]) / raw["head_dim"]}


def biased(file: GGUFFile, part: str = "attn_q") -> bool:
    """Whether the first layer's queries, or another part of it, have biases."""
    return f"blk.0.{part}.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors


def experts(fields: Fields) -> Raw:
    """How many experts there are, and how many a row takes."""
    return {"num_experts": fields.need("expert_count"), "num_experts_per_tok": fields.need("expert_used_count")}


def inner(fields: Fields, file: GGUFFile) -> int:
    """Inner units of an expert."""
    layer = fields.get("leading_dense_block_count", 0)
    return fields.get("expert_feed_forward_length", file.info(f"blk.{layer}.ffn_gate_exps.weight").shape[1])
