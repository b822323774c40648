"""Mixtures of experts whose blocks are those of OLMo and Granite 3."""

from __future__ import annotations

from ..config import EXPERTS, WIDTH
from ..loaders.fields import Fields, Flag, Kind, Whole
from .dense import GRANITE_SCALES, granite_scales
from .family import Family, Raw


def _olmoe(fields: Fields, raw: Raw) -> Raw:
    return {
        "experts": fields.need("num_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
        "normed_experts": fields.get("norm_topk_prob", False),
    }


def _granite(fields: Fields, raw: Raw) -> Raw:
    return {
        **granite_scales(fields, raw),
        "experts": fields.need("num_local_experts"),
        "experts_per_token": fields.need("num_experts_per_tok"),
    }


def _granite_shared(fields: Fields, raw: Raw) -> Raw:
    return {**_granite(fields, raw), "shared_inner": fields.get("shared_intermediate_size", 0)}


_COUNTS: dict[str, Kind] = dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), EXPERTS)
_GRANITE: dict[str, Kind] = {**_COUNTS, **GRANITE_SCALES}
GRANITE_PARTS = {
    **dict.fromkeys(("shared_gate", "shared_up"), "shared_mlp.input_linear"),
    "shared_down": "shared_mlp.output_linear",
    "router": "block_sparse_moe.router.layer",
}
GRANITE_EXPERTS = {
    **dict.fromkeys(("gate", "up"), "block_sparse_moe.input_linear"),
    "down": "block_sparse_moe.output_linear",
}
ROUTED: dict[str, Family] = {
    "olmoe": Family(
        fields={**_COUNTS, "norm_topk_prob": Flag()},
        switches={"qk_norm": True, "wide_qk_norm": True},
        derived=_olmoe,
    ),
    "granitemoe": Family(fields=_GRANITE, derived=_granite, parts=GRANITE_PARTS, experts=GRANITE_EXPERTS),
    "granitemoeshared": Family(
        fields={**_GRANITE, "shared_intermediate_size": Whole(0, WIDTH.most)},
        derived=_granite_shared,
        parts=GRANITE_PARTS,
        experts=GRANITE_EXPERTS,
    ),
}
