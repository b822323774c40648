"""Hybrids whose blocks are Llama's but for states and convolutions, as a table: Granite 4, Nemotron-H, LFM2-MoE."""

from __future__ import annotations

from typing import Any

from decodery.core.errors import CorruptFile

from ..config import EPS, EXPERTS, HEAD_DIM, HEADS, KERNEL, LAYERS, MOST_LAYERS, SCALE, WIDTH, Mamba, Rope
from ..loaders.fields import Anything, Either, Fields, Flag, Kind, Listed, Number, Text, Whole
from .dense import GRANITE_SCALES, LFM2_CONVOLVING, LFM2_PARTS, granite_scales
from .family import Family, Raw, first_dense, silu_alone
from .mamba_fields import MIXER, limits
from .routed import GRANITE_EXPERTS, GRANITE_PARTS

_STATES = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
_COUNTS: dict[str, Kind] = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), EXPERTS)


def _wanted(fields: Fields, values: dict[str, Any]) -> None:
    for name, wanted in values.items():
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)


def _granite(fields: Fields, raw: Raw) -> Raw:
    _wanted(fields, {"mamba_proj_bias": False, "mamba_conv_bias": True})
    layers, heads, hidden = (fields.need(name) for name in ("num_hidden_layers", "mamba_n_heads", "hidden_size"))
    kinds = fields.get("layer_types", fields.get("layers_block_type", ["linear_attention"] * layers))
    if len(kinds) != layers or any(kind not in _STATES for kind in kinds):
        raise CorruptFile(f"{fields.origin}: layer_types should name one of {', '.join(_STATES)} for each layer")
    inner = int(fields.get("mamba_expand", 2) * hidden)
    size = fields.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else size
    HEAD_DIM.check(size, f"{fields.origin}: mamba_d_head")
    if size * heads != inner:
        raise CorruptFile(f"{fields.origin}: {heads} states of {size} do not fit a width of {hidden}")
    shape = heads, size, fields.get("mamba_n_groups", 1), fields.need("mamba_d_state"), fields.get("mamba_d_conv", 4)
    recurrent = tuple(_STATES[kind] for kind in kinds)
    own = granite_scales(fields, raw)
    if any(recurrent):
        silu_alone(fields, raw)
        mamba = Mamba(*shape, *limits(raw.get("time_step_limit"), fields.origin))
        own |= {"mamba": mamba, "state_layers": recurrent}
    if fields.get("position_embedding_type", "nope") != "rope":
        own["rope"] = Rope(kind="none")
    shared, experts = fields.need("shared_intermediate_size"), fields.get("num_local_experts", 0)
    if experts:
        taken = fields.need("num_experts_per_tok")
        return own | {"experts": experts, "experts_per_token": taken, "shared_inner": shared}
    raw["intermediate_size"] = shared
    return own


_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp", "mamba": "linear_attention",
           "attention": "full_attention"}  # fmt: skip


def _nemotron(fields: Fields, raw: Raw) -> Raw:
    _wanted(fields, {
        "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True, "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2", "attention_bias": False, "moe_latent_size": None,
    })  # fmt: skip
    plain = ["linear_attention", "moe", "full_attention", "mlp"]
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    blocks = next((found for name in names if (found := fields.get(name)) is not None), plain)
    kinds = [_BLOCKS.get(each, each) for each in blocks]
    if any(kind not in _BLOCKS.values() for kind in kinds) or not kinds:
        raise CorruptFile(f"{fields.origin}: layers_block_type should name the kind of each layer")
    mixing, recurrent = (tuple(kind in some for kind in kinds) for some in (
        ("linear_attention", "full_attention"), ("linear_attention",),
    ))  # fmt: skip
    raw |= {"num_hidden_layers": len(kinds), "hidden_act": "relu2"}
    heads, size = fields.need("mamba_num_heads"), fields.need("mamba_head_dim")
    shape = heads, size, fields.get("n_groups", 8), fields.get("ssm_state_size", 128), fields.get("conv_kernel", 4)
    own: Raw = {"rope": Rope(kind="none"), "mixing_layers": mixing, "mlp_layers": tuple(not mixes for mixes in mixing)}
    if any(recurrent):
        own |= {"mamba": Mamba(*shape, fields.get("time_step_min", 0.001)), "state_layers": recurrent}
    if "moe" not in kinds:
        return own
    own |= {"dense_layers": tuple(kind != "moe" for kind in kinds), "dense_inner": fields.need("intermediate_size")}
    raw["intermediate_size"] = fields.need("moe_intermediate_size")
    groups, taken = fields.get("n_group", 1), fields.get("topk_group", 1)
    return own | {
        "experts": fields.need("n_routed_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "normed_experts": fields.get("norm_topk_prob", True),
        "experts_scale": float(fields.get("routed_scaling_factor", 1.0)),
        "sigmoid_router": True,
        "choice_bias": True,
        "shared_inner": fields.need("moe_shared_expert_intermediate_size"),
        **({"expert_groups": groups, "taken_groups": taken} if taken < groups else {}),
    }


def _lfm2(fields: Fields, raw: Raw) -> Raw:
    _wanted(fields, {"conv_bias": False})
    if fields.get("num_heads") not in (None, raw.get("num_attention_heads")):
        raise fields.unsupported("num_heads")
    silu_alone(fields, raw)
    layers, types = fields.need("num_hidden_layers"), fields.need("layer_types")
    if len(types) != layers or any(kind not in ("conv", "full_attention") for kind in types):
        raise CorruptFile(f"{fields.origin}: layer_types should name conv or full_attention for each layer")
    dense = min(fields.get("num_dense_layers", 2), layers)
    own: Raw = {
        "experts": fields.need("num_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "normed_experts": fields.get("norm_topk_prob", True),
        "experts_scale": float(fields.get("routed_scaling_factor", 1.0)),
        "choice_bias": fields.get("use_expert_bias", True),
        "dense_layers": first_dense(dense, layers),
        "dense_inner": fields.need("intermediate_size"),
    }
    raw["intermediate_size"] = fields.need("moe_intermediate_size")
    if (tied := fields.get("tie_embedding")) is not None:
        raw["tie_word_embeddings"] = tied
    convolving = tuple(kind == "conv" for kind in types)
    if any(convolving):
        own |= {"gated_conv": fields.get("conv_L_cache", 3), "conv_layers": convolving}
    return own


_TYPES = Listed(Text(64), MOST_LAYERS)
_GRANITE: dict[str, Kind] = {
    **_COUNTS,
    **dict.fromkeys(("mamba_n_heads", "mamba_n_groups"), HEADS),
    "mamba_d_state": HEAD_DIM,
    "mamba_d_head": Either(HEAD_DIM, Text(64)),
    "mamba_d_conv": KERNEL,
    "mamba_expand": Number(0.01, 1024.0),
    **dict.fromkeys(("mamba_proj_bias", "mamba_conv_bias"), Flag()),
    **GRANITE_SCALES,
    "shared_intermediate_size": WIDTH,
    "position_embedding_type": Text(64),
    "layers_block_type": _TYPES,
    "time_step_limit": Anything(),
}
_NEMOTRON: dict[str, Kind] = {
    **_COUNTS,
    **dict.fromkeys(("mamba_num_heads", "n_groups"), HEADS),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size"), HEAD_DIM),
    "conv_kernel": KERNEL,
    "time_step_min": Number(0.0, 1e6),
    "layer_norm_epsilon": EPS,
    "intermediate_size": WIDTH,
    "layers_block_type": _TYPES,
    "hybrid_override_pattern": Text(MOST_LAYERS),
    **dict.fromkeys(("use_bias", "mamba_proj_bias", "use_conv_bias", "attention_bias", "norm_topk_prob"), Flag()),
    **dict.fromkeys(("mamba_hidden_act", "mlp_hidden_act"), Text(64)),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "n_group", "topk_group"), EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), WIDTH),
    "routed_scaling_factor": SCALE,
    # The width of the states is that of their heads, and what bounds steps is time_step_min.
    **dict.fromkeys(("expand", "mamba_expand"), Number(0.01, 1024.0)),
    **dict.fromkeys(("time_step_limit", "mtp_layers_block_type", "mamba_ssm_cache_dtype", "num_logits_to_keep",
                     "moe_shared_expert_overlap", "mtp_hybrid_override_pattern"), Anything()),
}  # fmt: skip
_LFM2: dict[str, Kind] = {
    **_COUNTS,
    "norm_eps": EPS,
    **dict.fromkeys(("conv_bias", "norm_topk_prob", "use_expert_bias", "tie_embedding"), Flag()),
    "num_heads": HEADS,
    "conv_L_cache": KERNEL,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), WIDTH),
    "num_dense_layers": Whole(0, LAYERS.most),
    "routed_scaling_factor": SCALE,
}
_W = {"gate": "w1", "up": "w3", "down": "w2"}
RECURRENT: dict[str, Family] = {
    "granitemoehybrid": Family(
        fields=_GRANITE,
        derived=_granite,
        parts=GRANITE_PARTS
        | {**dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"), "down": "shared_mlp.output_linear"},
        experts=GRANITE_EXPERTS,
        recurrent={part: f"mamba.{name}" for part, name in MIXER.items()},
    ),
    "nemotron_h": Family(
        names={"layer_norm_epsilon": "rms_norm_eps"},
        fields=_NEMOTRON,
        switches={"gated": False, "output_bias": False},
        derived=_nemotron,
        parts={
            **dict.fromkeys(("attention_norm", "mlp_norm"), "norm"),
            **{part: f"mixer.{part}_proj" for part in "qkv"},
            "output": "mixer.o_proj",
            **{half: f"mixer.{half}_proj" for half in ("up", "down")},
            **{f"shared_{half}": f"mixer.shared_experts.{half}_proj" for half in ("up", "down")},
            "router": "mixer.gate",
        },
        exact={"choice_bias": "mixer.gate.e_score_correction_bias"},
        experts={half: f"mixer.experts.{{}}.{half}_proj" for half in ("up", "down")},
        recurrent={part: f"mixer.{name}" for part, name in MIXER.items()},
        whole={"embedding": "backbone.embeddings", "norm": "backbone.norm_f"},
        layers="backbone.layers",
    ),
    "lfm2_moe": Family(
        theta=1_000_000.0,
        names={"norm_eps": "rms_norm_eps"},
        fields=_LFM2,
        switches={"qk_norm": True, "sigmoid_router": True},
        derived=_lfm2,
        parts=LFM2_PARTS | {"router": "feed_forward.gate"},
        exact={"choice_bias": "feed_forward.expert_bias"},
        experts={half: f"feed_forward.experts.{{}}.{name}" for half, name in _W.items()},
        convolving=LFM2_CONVOLVING,
        whole={"norm": "model.embedding_norm"},
    ),
}
