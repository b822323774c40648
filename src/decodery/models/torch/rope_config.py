"""The rotation of positions as configurations describe it."""

from __future__ import annotations

import math

from decodery.core.errors import UnsupportedModel

from ..config import FACTOR, HEAD_DIM, POSITIONS, SCALE, THETA, Rope
from ..families.arranged import ARRANGED
from ..families.layouts import TURNED
from ..loaders.fields import Fields, Flag, Kind, Listed, Number, Record, Text
from .latent import LATENTS

LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE: dict[str, Kind] = {
    "rope_type": Text(64),
    "type": Text(64),
    "rope_theta": THETA,
    "factor": FACTOR,
    "original_max_position_embeddings": POSITIONS,
    "low_freq_factor": SCALE,
    "high_freq_factor": SCALE,
    "beta_fast": SCALE,
    "beta_slow": SCALE,
    "truncate": Flag(),
    "attention_factor": SCALE,
    "mscale": Number(0.0, 1e6),
    "mscale_all_dim": Number(0.0, 1e6),
    "partial_rotary_factor": Number(0.0, 1.0),
    **dict.fromkeys(("short_factor", "long_factor"), Listed(FACTOR, HEAD_DIM.most)),
}
FIELDS: dict[str, Kind] = {
    "rope_theta": THETA,
    "rope_local_base_freq": THETA,
    "partial_rotary_factor": Number(0.0, 1.0),
    "rope_scaling": Record(ROPE),
    "rope_parameters": Record(ROPE | dict.fromkeys(LAYER_TYPES, Record(ROPE))),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), POSITIONS),
}
"""What configurations say of rotation, and of how far it goes."""
_ORIGINAL = "original_max_position_embeddings"
_KINDS = ("default", "dynamic", "linear", "llama3", "yarn", "longrope", "proportional")
_LONG = {"su": "longrope"}
"""What older files call kinds of rotation."""
_UNREAD = ("finetuned",)
"""Whether the model was trained with the rotation."""


def rope_fields(fields: Fields) -> Fields:
    """The rope parameters, which older files keep as rope_scaling beside rope_theta."""
    parameters = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if any(kind in parameters for kind in LAYER_TYPES):
        raise UnsupportedModel(f"{fields.origin}: rope_parameters for each kind of layer are not known for this family")
    parameters.setdefault("rope_theta", fields.get("rope_theta", 10_000.0))
    parameters.setdefault("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return Fields(parameters, f"{fields.origin}: rope_parameters", ROPE)


def gemma_ropes(fields: Fields) -> tuple[Rope, Rope]:
    """Gemma 3's global and local rotation."""
    return ropes_by_kind(fields, (fields.get("rope_theta", 1_000_000.0), fields.get("rope_local_base_freq", 10_000.0)))


def ropes_by_kind(fields: Fields, thetas: tuple[float, float]) -> tuple[Rope, Rope]:
    """The rotations of layers that see everything and of those that slide.

    Args:
        thetas: Their bases where none is named.
    """
    both = fields.get("rope_parameters", {})
    if both and not any(kind in both for kind in LAYER_TYPES):
        raise UnsupportedModel(f"{fields.origin}: rope_parameters should name each kind of layer: {LAYER_TYPES}")
    ropes = []
    for kind, theta in zip(LAYER_TYPES, thetas, strict=True):
        parameters = dict(both.get(kind) or {})
        if kind == "full_attention":
            parameters.update(fields.get("rope_scaling", {}))
        parameters.setdefault("rope_theta", theta)
        ropes.append(read_rope(Fields(parameters, f"{fields.origin}: rope_parameters of {kind}", ROPE), fields))
    return ropes[0], ropes[1]


def turned_dims(fields: Fields, family: str, head_dim: int) -> int:
    """How many dimensions of a head are turned, 0 for all of them."""
    if family not in ARRANGED:
        return 0
    if family in LATENTS:
        return 0
    factor = rope_fields(fields).get("partial_rotary_factor", TURNED.get(family, 1.0))
    return 0 if factor == 1 else int(head_dim * factor)


def read_rope(parameters: Fields, fields: Fields, turned: int = 0) -> Rope:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind, share = _LONG.get(kind, kind), parameters.get("partial_rotary_factor", 1.0)
    if not turned and share not in (0, 1) and kind != "proportional":
        raise parameters.unsupported("partial_rotary_factor")
    theta = parameters.need("rope_theta")
    if kind not in _KINDS:
        raise UnsupportedModel(f"{parameters.origin}: rope_type {kind!r} is not supported")
    others = parameters.raw.keys() - parameters.kinds.keys() - {*_UNREAD}
    if unknown := next((name for name in sorted(others) if parameters.raw[name]), None):
        raise parameters.unsupported(unknown)
    if kind in ("default", "dynamic"):
        # What is dynamic stretches texts alone that are longer than the context, where all texts end here.
        return Rope(theta=theta, rotated=turned)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=parameters.need("factor"), rotated=turned)
    if kind == "proportional":
        if turned:
            raise parameters.unsupported("rope_type")
        return Rope(theta=theta, kind=kind, factor=parameters.get("factor", 1.0), share=share)
    positions = fields.get("max_position_embeddings", 2048)
    original = fields.get(_ORIGINAL) or parameters.get(_ORIGINAL, positions)
    if kind == "longrope":
        return _longrope(parameters, theta, positions, original, turned)
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=parameters.need("factor"),
            original_max_positions=original,
            low_freq_factor=parameters.need("low_freq_factor"),
            high_freq_factor=parameters.need("high_freq_factor"),
            rotated=turned,
        )
    return Rope(
        theta=theta,
        kind=kind,
        factor=parameters.get("factor", positions / original),
        original_max_positions=original,
        beta_fast=parameters.get("beta_fast", 32.0),
        beta_slow=parameters.get("beta_slow", 1.0),
        truncate=parameters.get("truncate", True),
        attention_factor=parameters.get("attention_factor"),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        rotated=turned,
    )


def _longrope(parameters: Fields, theta: float, positions: int, original: int, turned: int) -> Rope:
    """LongRoPE's rotation for texts of up to `positions` tokens.

    A model whose context is longer than what it was trained on first has one set of factors for texts that are longer
    than that, and one for others. A row is the same whatever comes after it, so which set it is follows from the
    context alone: the long one where it is longer.
    """
    ratio = parameters.get("factor", positions / original)
    factor = parameters.get("attention_factor")
    if factor is None:
        factor = 1.0 if ratio <= 1.0 else math.sqrt(1 + math.log(ratio) / math.log(original))
    factors = parameters.need("long_factor" if positions > original else "short_factor")
    return Rope(
        theta=theta,
        kind="factors",
        factors=tuple(float(each) for each in factors),
        attention_factor=factor,
        original_max_positions=original,
        rotated=turned,
    )
