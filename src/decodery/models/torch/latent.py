"""Attention over latents: what keys and values are made from is kept in their place, one vector a row for all heads.

DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model (2024), multi-head latent attention.
A head's key is a matrix times the latent, so its product with a query is that of the latent with the query times the
matrix; and what a head finds among values is a matrix times what it finds among latents. So queries go to the latents,
and rows are attended to as those of one key-value head: `rank` numbers of the latent, then those that are turned.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import rms_norm

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import EXPERTS, HEAD_DIM, HEADS, LAYERS, SCALE, WIDTH, Latent, ModelConfig, Rope
from ..loaders.fields import Fields, Flag, Kind, Listed, Text, Whole
from .attention import rotate
from .weights import Layer

LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")

EPS = 1e-6
"""Of the norms of latents and of what queries are made from, whatever that of the others is."""
FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD_DIM),
    "q_lora_rank": WIDTH,
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), WIDTH),
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "num_experts_per_tok"), EXPERTS),
    "first_k_dense_replace": Whole(0, LAYERS.most),
    "mlp_layer_types": Listed(Text(64), LAYERS.most),
    "moe_layer_freq": LAYERS,
    "routed_scaling_factor": SCALE,
    "topk_method": Text(64),
    "scoring_func": Text(64),
    **dict.fromkeys(("n_group", "topk_group"), EXPERTS),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), Whole(0, LAYERS.most)),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave"), Flag()),
    "mlp_bias": Flag(),
    "attention_bias": Flag(),
}


def restated(raw: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration in Llama's names, and further fields of `ModelConfig`."""
    fields = Fields(raw, origin, FIELDS)
    second = raw.get("model_type") == "deepseek_v2"
    routing = _chosen_softly(fields) if second else _judged_apart(fields)
    for name, wanted in (
        ("scoring_func", "softmax" if second else "sigmoid"),
        *((("rope_interleave", True), ("norm_topk_prob", False)) if second else (("topk_method", "noaux_tc"),)),
        ("moe_layer_freq", 1),
        ("mlp_bias", False),
        ("attention_bias", False),
    ):
        if fields.get(name, wanted) != wanted:
            raise fields.unsupported(name)
    turned = fields.need("qk_rope_head_dim")
    latent = Latent(
        fields.need("kv_lora_rank"),
        turned,
        fields.need("qk_nope_head_dim"),
        fields.need("v_head_dim"),
        fields.get("q_lora_rank", 0),
        fields.get("rope_interleave", True),
    )
    inner = fields.need("moe_intermediate_size")
    if turned % 2:
        raise UnsupportedModel(f"{origin}: {turned} dimensions of a head are turned, which are not pairs")
    dense = _dense(fields, raw.get("model_type", ""))
    own = {
        "latent": latent,
        "experts": fields.need("n_routed_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        **routing,
        "shared_inner": inner * fields.get("n_shared_experts", 0 if second else 1),
        **({"dense_layers": dense, "dense_inner": fields.need("intermediate_size")} if any(dense) else {}),
    }
    left = {name: value for name, value in raw.items() if name not in ("num_experts", "num_experts_per_tok")}
    one = {"num_key_value_heads": 1, "head_dim": latent.rank + turned, "intermediate_size": inner}
    return left | one | {"rms_norm_eps": raw.get("rms_norm_eps", 1e-6)}, own


def _chosen_softly(fields: Fields) -> dict[str, Any]:
    """How DeepSeek-V2's router chooses, as fields of `ModelConfig`."""
    own = {"normed_experts": False, "experts_scale": float(fields.get("routed_scaling_factor", 1.0))}
    method = fields.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        groups, taken = fields.need("n_group"), fields.need("topk_group")
        return own | ({"expert_groups": groups, "taken_groups": taken, "group_best": 1} if taken < groups else {})
    if method != "greedy":
        raise fields.unsupported("topk_method")
    return own


def _judged_apart(fields: Fields) -> dict[str, Any]:
    """How the routers of DeepSeek-V3 and GLM-4.7-Flash choose, as fields of `ModelConfig`."""
    flash = fields.raw.get("model_type") == "glm4_moe_lite"
    own = {"sigmoid_router": True, "choice_bias": True, "normed_experts": fields.get("norm_topk_prob", True)}
    own["experts_scale"] = float(fields.get("routed_scaling_factor", 1.8 if flash else 2.5))
    groups, taken = fields.get("n_group", 1 if flash else 8), fields.get("topk_group", 1 if flash else 4)
    return own | ({"expert_groups": groups, "taken_groups": taken} if taken < groups else {})


def _dense(fields: Fields, family: str) -> tuple[bool, ...]:
    """Which layers have one MLP in place of experts."""
    layers = fields.need("num_hidden_layers")
    if (kinds := fields.get("mlp_layer_types")) is not None:
        if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
            raise CorruptFile(
                f"{fields.origin}: mlp_layer_types should name dense or sparse for each of {layers} layers"
            )
        return tuple(kind == "dense" for kind in kinds)
    first = {"deepseek_v3": 3, "glm4_moe_lite": 1}.get(family, 0)
    return tuple(layer < fields.get("first_k_dense_replace", first) for layer in range(layers))


def scale(latent: Latent, rope: Rope) -> float:
    """What products of queries and keys are multiplied by; a rotation that was stretched makes it larger."""
    plain: float = (latent.plain + latent.turned) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        return plain * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return plain


_PARTS = {
    "q": "self_attn.q_proj",
    "q_down": "self_attn.q_a_proj",
    "q_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv": "self_attn.kv_a_proj_with_mqa",
    "k_norm": "self_attn.kv_a_layernorm",
    "heads_up": "self_attn.kv_b_proj",
    "router": "mlp.gate",
    **{f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}


def latent_name(name: str, layer: str | None, kind: str, config: ModelConfig) -> str | None:
    """What these families call a part of layer number `layer`, or of the whole model.

    None: what Llama's call it.
    """
    if layer is not None and name == "choice_bias":
        return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    return None if layer is None or name not in _PARTS else f"model.layers.{layer}.{_PARTS[name]}.{kind}"


def rows(name: str, config: ModelConfig) -> torch.Tensor | None:
    """[n] int64, the rows of its tensors that a part of a layer is.

    See `arranged.rows`.
    """
    latent = config.latent
    assert latent is not None
    pairs = torch.arange(latent.turned, device="cpu")
    if latent.paired:
        pairs = torch.cat((pairs[::2], pairs[1::2]))
    if name == "kv":
        return torch.cat((torch.arange(latent.rank, device="cpu"), latent.rank + pairs))
    if name not in ("q", "q_up"):
        return None
    size = latent.plain + latent.turned
    own = torch.cat((torch.arange(latent.plain, device="cpu"), latent.plain + pairs))
    return (size * torch.arange(config.num_heads, device="cpu")[:, None] + own).flatten()


def queries_and_latents(
    layer: Layer, config: ModelConfig, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [N, heads, rank + turned], and rows [N, 1, rank + turned] that are kept.

    Args:
        cos, sin: [N, 1, head_dim / 2], of which the first pairs are turned.
    """
    latent = config.latent
    assert latent is not None and layer.k_norm is not None and layer.heads_up is not None
    pairs, kept = latent.turned // 2, latent.rank + latent.turned
    cos, sin = cos[..., :pairs], sin[..., :pairs]
    found, held = layer.qkv(normed).tensor_split((-kept,), dim=-1)
    if layer.q_up is not None:
        assert layer.q_norm is not None
        found = layer.q_up(rms_norm(found, found.shape[-1:], layer.q_norm.to(found.dtype), EPS))
    plain, turned = found.unflatten(-1, (config.num_heads, -1)).split((latent.plain, latent.turned), dim=-1)
    keys = _heads_up(layer, config)[:, : latent.plain].to(plain.dtype)
    queries = torch.cat((torch.einsum("nhp,hpr->nhr", plain, keys), rotate(turned, cos, sin)), dim=-1)
    told, own = held[:, None].split((latent.rank, latent.turned), dim=-1)
    told = rms_norm(told, told.shape[-1:], layer.k_norm.to(told.dtype), EPS)
    return queries, torch.cat((told, rotate(own, cos, sin)), dim=-1)


def values_of(layer: Layer, config: ModelConfig, context: torch.Tensor) -> torch.Tensor:
    """Heads' sums of kept rows, [N, heads * head_dim], as sums of values, [N, heads * value]."""
    latent = config.latent
    assert latent is not None
    found = context.unflatten(-1, (config.num_heads, -1))[..., : latent.rank]
    values = _heads_up(layer, config)[:, latent.plain :].to(found.dtype)
    return torch.einsum("nhr,hvr->nhv", found, values).flatten(1)


def _heads_up(layer: Layer, config: ModelConfig) -> torch.Tensor:
    """[heads, plain + value, rank]"""
    assert layer.heads_up is not None
    return layer.heads_up.unflatten(0, (config.num_heads, -1))
