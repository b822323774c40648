"""Mixtures of experts whose blocks are otherwise Llama's: Qwen2-MoE, GLM-4.5, LLaDA 2, gpt-oss and Llama 4."""

from __future__ import annotations

import torch

from decodery.core.errors import CorruptFile

from ..config import (
    CLAMPED,
    EXPERTS,
    HEAD_DIM,
    LAYERS,
    MOST_LAYERS,
    POSITIONS,
    SCALE,
    WIDTH,
    ModelConfig,
    Rope,
    Temperature,
)
from ..loaders.fields import Either, Fields, Flag, Kind, Listed, Number, Text, Whole
from .family import Family, Raw, first_dense, windows

_SHARED = ("gate", "up", "down")


def every_layer(fields: Fields) -> None:
    """Raise UnsupportedModel where some layers have one MLP in place of experts."""
    for name, plain in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if fields.get(name, plain) != plain:
            raise fields.unsupported(name)


STACKED = {"gpt_oss": "mlp.experts", "llama4_text": "feed_forward.experts"}
"""By family, what begins the names of the tensors that hold all experts of a layer."""


def stacked_name(part: str, family: str) -> str:
    """The tensor of all experts that holds a part such as "experts.3.gate.weight"."""
    _, _, half, kind = part.split(".")
    return f"{STACKED[family]}.{'down' if half == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def of_stack(part: str, stacked: torch.Tensor, family: str) -> torch.Tensor:
    """Such a part of its tensor, whose matrices are [in, out].

    Gates and what they open take turns in gpt-oss, and are halves in Llama 4.

    Args:
        part: Its whole name, such as "layers.0.experts.3.gate.weight".
    """
    _, _, _, number, half, _ = part.split(".")
    if int(number) >= len(stacked):
        raise CorruptFile(f"there are {len(stacked)} experts in a file where there should be more: get it again")
    own = stacked[int(number)]
    own = own.T if own.ndim == 2 else own
    if half == "down":
        return own
    second = ("gate", "up").index(half)
    return own[second::2] if family == "gpt_oss" else own.chunk(2)[second]


def stack_rows(part: str, outputs: int) -> torch.Tensor:
    """[n] int64, which rows of gpt-oss's quantized experts, one after the other, such a part is.

    Args:
        part: Its whole name.
        outputs: Of one expert, gates and what they open taking turns.
    """
    _, _, _, number, half, _ = part.split(".")
    own = torch.arange(int(number) * outputs, (int(number) + 1) * outputs, device="cpu")
    return own if half == "down" else own[("gate", "up").index(half) :: 2]


STACKS = (
    *("experts.gate_up_proj", "experts.down_proj"),
    *("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
"""How tensors of all experts end, of families that may have them in one: [experts, out, in]."""


def stacked_experts(part: str, name: str, config: ModelConfig) -> tuple[str, ...]:
    """What some checkpoints call the tensor that holds an expert's part `part`, which others call `name`."""
    if config.family not in ("qwen3_5_moe_text", "gemma4_text") or ".experts." not in part:
        return ()
    return (f"{name.split('.experts.')[0]}.{STACKS[part.split('.')[4] == 'down']}",)


def of_whole_stack(part: str, stacked: torch.Tensor) -> torch.Tensor:
    """Such a part of its tensor, in which what gates open follows the gates."""
    _, _, _, number, half, _ = part.split(".")
    if int(number) >= len(stacked):
        raise CorruptFile(f"there are {len(stacked)} experts in a file where there should be more: get it again")
    own = stacked[int(number)]
    return own if half == "down" else own.chunk(2)[("gate", "up").index(half)]


def _qwen2(fields: Fields, raw: Raw) -> Raw:
    every_layer(fields)
    raw["intermediate_size"] = fields.need("moe_intermediate_size")
    return {
        "experts": fields.need("num_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "normed_experts": fields.get("norm_topk_prob", False),
        "shared_inner": fields.need("shared_expert_intermediate_size"),
        "qkv_bias": fields.get("qkv_bias", True),
        **(_qwen2_windows(fields) if fields.get("use_sliding_window", False) else {}),
    }


def _qwen2_windows(fields: Fields) -> Raw:
    """Every other layer slides, of the first ones; in Qwen2, `max_window_layers` counts those that do not."""
    found = windows(fields, 2)
    if fields.get("layer_types") is not None:
        return found
    most = fields.get("max_window_layers", 28)
    sliding = tuple(slides and layer < most for layer, slides in enumerate(found["sliding_layers"]))
    return {"sliding_window": found["sliding_window"] if any(sliding) else None, "sliding_layers": sliding}


def _glm4(fields: Fields, raw: Raw) -> Raw:
    inner, layers = fields.need("moe_intermediate_size"), fields.need("num_hidden_layers")
    dense = first_dense(min(fields.get("first_k_dense_replace", 1), layers), layers)
    own_inner = fields.need("intermediate_size")
    raw["intermediate_size"] = inner
    groups, taken = fields.get("n_group", 1), fields.get("topk_group", 1)
    return {
        "experts": fields.need("n_routed_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "normed_experts": fields.get("norm_topk_prob", True),
        "experts_scale": float(fields.get("routed_scaling_factor", 1.0)),
        "shared_inner": inner * fields.get("n_shared_experts", 1),
        "qk_norm": fields.get("use_qk_norm", False),
        "output_bias": False,
        **({"expert_groups": groups, "taken_groups": taken} if taken < groups else {}),
        **({"dense_layers": dense, "dense_inner": own_inner} if any(dense) else {}),
    }


def _llada2(fields: Fields, raw: Raw) -> Raw:
    """LLaDA 2: its released code norms the weights of the chosen experts and adds their bias whatever is said of it."""
    for name, wanted in (("norm_topk_prob", True), ("score_function", "sigmoid"), ("norm_head", False)):
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    found = _glm4(
        Fields(fields.raw | {"n_routed_experts": fields.need("num_experts")}, fields.origin, fields.kinds), raw
    )
    return found | {
        "normed_experts": found["experts_per_token"] > 1,
        "experts_scale": float(fields.get("routed_scaling_factor", 2.5)),
        "shared_inner": fields.need("moe_intermediate_size") * (fields.get("num_shared_experts", 0) or 0),
        "qk_norm": fields.get("use_qk_norm", True),
        "qkv_bias": fields.get("use_qkv_bias", False),
        "output_bias": fields.get("use_bias", True),
    }


def _gpt_oss(fields: Fields, raw: Raw) -> Raw:
    for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.get(name, known) != known:
            raise fields.unsupported(name)
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw["rope_parameters"] = {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            **{"original_max_position_embeddings": 4096, "rope_theta": raw["rope_theta"]},
        }
    bias = raw.get("attention_bias", True)
    return {
        "experts": fields.get("num_local_experts", fields.get("num_experts", 0)),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "activation": CLAMPED,
        "qkv_bias": bias,
        "output_bias": bias,
        **windows(fields, 2),
    }


def _llama4(fields: Fields, raw: Raw) -> Raw:
    layers = fields.need("num_hidden_layers")
    interval, step = fields.get("no_rope_layer_interval", 4), fields.get("interleave_moe_layer_step", 1)
    turned = fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    mixed = fields.get("moe_layers")
    mixed = range(step - 1, layers, step) if mixed is None else mixed
    if len(turned) < layers or any(layer >= layers for layer in mixed):
        raise CorruptFile(f"{fields.origin}: no_rope_layers or moe_layers do not fit {layers} layers")
    still, dense = tuple(not turns for turns in turned[:layers]), tuple(layer not in mixed for layer in range(layers))
    types = fields.get("layer_types") or ["full_attention" if each else "chunked_attention" for each in still]
    if len(types) != layers or any(kind not in ("full_attention", "chunked_attention") for kind in types):
        raise CorruptFile(
            f"{fields.origin}: layer_types should name full_attention or chunked_attention for each of {layers} layers"
        )
    chunk, cut = fields.get("attention_chunk_size"), tuple(kind == "chunked_attention" for kind in types)
    if any(cut) and chunk is None:
        raise CorruptFile(f"{fields.origin}: layers are cut into chunks, and there is no attention_chunk_size")
    own: Raw = {"qkv_bias": raw.get("attention_bias", False), "unit_norms": fields.get("use_qk_norm", True)}
    if any(cut):
        own |= {"chunked": True, "sliding_window": chunk, "sliding_layers": cut}
    if any(still):
        own |= {"local_rope": Rope(kind="none"), "local_rope_layers": still}
    if fields.get("attn_temperature_tuning", True):
        length, scale = fields.get("floor_scale", 8192), fields.get("attn_scale", 0.1)
        own["temperature"] = Temperature(float(scale), length, 1, unturned=True)
    raw.pop("num_local_experts")
    if all(dense):
        raw["intermediate_size"] = fields.need("intermediate_size_mlp")
        return own
    if any(dense):
        own |= {"dense_layers": dense, "dense_inner": fields.need("intermediate_size_mlp")}
    return own | {
        "experts": fields.need("num_local_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        **{"sigmoid_router": True, "normed_experts": False, "scaled_inputs": True},
        "shared_inner": fields.need("intermediate_size"),
    }


_COUNTS: dict[str, Kind] = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), EXPERTS)
QWEN: dict[str, Kind] = {
    **_COUNTS,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("norm_topk_prob", "use_sliding_window", "qkv_bias"), Flag()),
    "decoder_sparse_step": LAYERS,
    "mlp_only_layers": Listed(Whole(0, MOST_LAYERS), MOST_LAYERS),
}
_GLM: dict[str, Kind] = {
    **_COUNTS,
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "n_group", "topk_group"), EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), WIDTH),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm"), Flag()),
    "first_k_dense_replace": Whole(0, LAYERS.most),
    "routed_scaling_factor": SCALE,
    # Layers that predict further tokens follow the others in a file; they draft, and are left out.
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), Whole(0, LAYERS.most)),
}
_LLADA2: dict[str, Kind] = {
    **_GLM,
    "num_shared_experts": Whole(0, EXPERTS.most),
    **dict.fromkeys(("use_qkv_bias", "use_bias", "norm_head"), Flag()),
    # What the released code leaves unread.
    **dict.fromkeys(("moe_router_enable_expert_bias", "use_rmsnorm"), Flag()),
    **dict.fromkeys(("score_function", "router_dtype"), Text(64)),
    **dict.fromkeys(("output_dropout", "mtp_loss_scaling_factor", "router_aux_loss_coef"), Number(0.0, 1e6)),
    "rotary_dim": HEAD_DIM,
}
_GPT_OSS: dict[str, Kind] = {**_COUNTS, **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), Number(0.0, 1e6))}
QWEN_SHARED = {
    "shared_router": "mlp.shared_expert_gate",
    **{f"shared_{half}": f"mlp.shared_expert.{half}_proj" for half in _SHARED},
}
_LLAMA4: dict[str, Kind] = {
    **_COUNTS,
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), WIDTH),
    **dict.fromkeys(("no_rope_layer_interval", "interleave_moe_layer_step"), LAYERS),
    "no_rope_layers": Listed(Whole(0, 1), MOST_LAYERS),
    "moe_layers": Listed(Whole(0, MOST_LAYERS), MOST_LAYERS),
    **dict.fromkeys(("attention_chunk_size", "floor_scale"), POSITIONS),
    "attn_scale": SCALE,
    "use_qk_norm": Flag(),
    "attn_temperature_tuning": Either(Flag(), Whole(0, POSITIONS.most)),
}
MIXED: dict[str, Family] = {
    "llama4_text": Family(
        theta=500_000.0,
        fields=_LLAMA4,
        derived=_llama4,
        parts={
            "router": "feed_forward.router",
            **{half: f"feed_forward.{half}_proj" for half in _SHARED},
            **{f"shared_{half}": f"feed_forward.shared_expert.{half}_proj" for half in _SHARED},
        },
    ),
    "qwen2_moe": Family(
        fields={**QWEN, "max_window_layers": Whole(0, 2**31 - 1)},
        switches={"shared_gate": True},
        derived=_qwen2,
        parts=QWEN_SHARED,
    ),
    "glm4_moe": Family(
        fields=_GLM,
        switches={"sigmoid_router": True, "choice_bias": True},
        derived=_glm4,
        parts={f"shared_{half}": f"mlp.shared_experts.{half}_proj" for half in _SHARED},
        exact={"choice_bias": "mlp.gate.e_score_correction_bias"},
    ),
    "llada2_moe": Family(
        fields=_LLADA2,
        switches={"sigmoid_router": True, "choice_bias": True},
        derived=_llada2,
        parts={
            "output": "attention.dense",
            "q_norm": "attention.query_layernorm",
            "k_norm": "attention.key_layernorm",
            **{f"shared_{half}": f"mlp.shared_experts.{half}_proj" for half in _SHARED},
        },
        exact={"choice_bias": "mlp.gate.expert_bias"},
        whole={"embedding": "model.word_embeddings"},
    ),
    "gpt_oss": Family(
        theta=150_000.0,
        fields=_GPT_OSS,
        switches={"sinks": True, "router_bias": True, "expert_bias": True},
        derived=_gpt_oss,
        parts={"router": "mlp.router"},
        exact={"router_bias": "mlp.router.bias", "sinks": "self_attn.sinks"},
    ),
}
