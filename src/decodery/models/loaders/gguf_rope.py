"""The rotation of a GGUF file: its metadata, and the tensors that divide frequencies."""

from __future__ import annotations

from decodery.core.errors import CorruptFile

from ..config import FACTOR, HEAD_DIM, POSITIONS, SCALE, THETA, Rope
from .fields import Fields, Kind, Number, Text
from .gguf_file import GGUFFile

FREQUENCIES = "rope_freqs.weight"
"""The tensor that divides the frequencies of rotation, as in Llama 3's files."""
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same of LongRoPE, for texts beyond the context that a model was trained on first, and for others."""
FACTORS = (FREQUENCIES, _LONG, _SHORT)
KINDS: dict[str, Kind] = {
    "context_length": POSITIONS,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": THETA,
    "rope.freq_base_swa": THETA,
    "rope.scaling.type": Text(64),
    "rope.scaling.factor": FACTOR,
    "rope.scaling.attn_factor": SCALE,
    "rope.scaling.original_context_length": POSITIONS,
    "rope.scaling.yarn_ext_factor": Number(-1.0, 1e6),
    **{f"rope.scaling.yarn_{name}": SCALE for name in ("attn_factor", "beta_fast", "beta_slow")},
}


def read_rope(file: GGUFFile, fields: Fields, theta: float, head_dim: int) -> Rope:
    """The rotation of the layers that have no other one.

    Args:
        fields: Metadata, whose names are those after the architecture's.
        theta: The base where the file has none.
    """
    theta, turned = fields.get("rope.freq_base", theta), fields.get("rope.dimension_count", head_dim)
    rotated = 0 if turned == head_dim else turned
    original = fields.get("rope.scaling.original_context_length", 0)
    factor = fields.get("rope.scaling.factor", 1.0)
    # A factor alone is that of positions, as llama.cpp reads it.
    kind = fields.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if _LONG in file.tensors or _SHORT in file.tensors:
        # Which set it is follows from the context alone, as in a config.json.
        name = _LONG if fields.need("context_length") > original else _SHORT
        _refuse_scaling(fields, kind, factor, "longrope")
        scale = fields.get("rope.scaling.attn_factor", 1.0)
        factors = _factors(file, name, turned, fields.origin)
        return Rope(
            theta, "factors", factors=factors, attention_factor=scale, original_max_positions=original, rotated=rotated
        )
    if FREQUENCIES in file.tensors:
        _refuse_scaling(fields, kind, factor, "none")
        return Rope(theta, "factors", factors=_factors(file, FREQUENCIES, turned, fields.origin), rotated=rotated)
    if kind == "none":
        return Rope(theta, rotated=rotated)
    fields.need("rope.scaling.factor")
    if kind == "linear":
        return Rope(theta, "linear", factor=factor, rotated=rotated)
    if kind != "yarn":
        raise fields.unsupported("rope.scaling.type")
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor"):
        if fields.get(name, 1.0) != 1.0:
            raise fields.unsupported(name)
    multiplier = fields.get("rope.scaling.yarn_log_multiplier") or None
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=fields.need("rope.scaling.original_context_length"),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.get("rope.scaling.yarn_attn_factor"),
        mscale=1.0 if multiplier else None,
        mscale_all_dim=multiplier,
        rotated=rotated,
    )


def _refuse_scaling(fields: Fields, kind: str, factor: float, known: str) -> None:
    """Refuse a scaling beside tensors that divide frequencies, but for the one of a name that they are.

    Raises UnsupportedModel.
    """
    if kind not in ("none", known):
        raise fields.unsupported("rope.scaling.type" if factor == 1.0 else "rope.scaling.factor")
    if kind != "none" and factor != 1.0:
        raise fields.unsupported("rope.scaling.factor")


def _factors(file: GGUFFile, name: str, turned: int, origin: str) -> tuple[float, ...]:
    """What frequencies are divided by, one for each pair that is turned."""
    if file.info(name).shape != (turned // 2,):
        raise CorruptFile(f"{origin}: {name} should hold {turned // 2} numbers")
    factors: list[float] = file.rows(name).tolist()
    for number, factor in enumerate(factors):
        FACTOR.check(factor, f"{origin}: {name}[{number}]")
    return tuple(factors)
