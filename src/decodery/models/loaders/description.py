"""What is kept of a model beside its weights and its tokenizer: one JSON file, written by us, read with care."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile

from ..config import (
    EPS,
    EXPERTS,
    FACTOR,
    HEAD_DIM,
    HEADS,
    KERNEL,
    LAYERS,
    MOST_LAYERS,
    POSITIONS,
    SCALE,
    THETA,
    TOKEN_ID,
    TOKENS,
    WIDTH,
    Alternating,
    GatedDelta,
    Latent,
    Mamba,
    ModelConfig,
    Rope,
    Selective,
    Shared,
    ShortConv,
    Temperature,
)
from ..families.masked import BLOCK
from .config_check import check_config
from .fields import Fields, Flag, Kind, Listed, Named, Number, Record, Text, Whole, read_json

_SOURCE = Text()
_ROPE: dict[str, Kind] = {
    "theta": THETA,
    "kind": Text(64),
    "factor": FACTOR,
    "original_max_positions": Whole(0, POSITIONS.most),
    "low_freq_factor": SCALE,
    "high_freq_factor": SCALE,
    "beta_fast": SCALE,
    "beta_slow": SCALE,
    "attention_factor": SCALE,
    "mscale": Number(0.0, 1e6),
    "mscale_all_dim": Number(0.0, 1e6),
    "truncate": Flag(),
    "factors": Listed(FACTOR, HEAD_DIM.most),
    "rotated": Whole(0, HEAD_DIM.most),
    "share": Number(0.0, 1.0),
}
_STATES: dict[str, Kind] = {
    **dict.fromkeys(("heads", "groups"), HEADS),
    **dict.fromkeys(("head_dim", "state"), HEAD_DIM),
    "kernel": KERNEL,
}
_DELTA: dict[str, Kind] = {**_STATES, "in_turns": Flag()}
_MAMBA: dict[str, Kind] = {
    **_STATES,
    **dict.fromkeys(("least_step", "most_step"), Number(0.0, 1e30)),
    "normed": Flag(),
}
_SELECTIVE: dict[str, Kind] = {**_STATES, "heads": WIDTH, "rank": WIDTH, "step_eps": EPS, "weighted": Flag()}
_LATENT: dict[str, Kind] = {
    **dict.fromkeys(("rank", "turned", "plain", "value"), HEAD_DIM),
    "queries": Whole(0, WIDTH.most),
    "paired": Flag(),
}
_SHARED: dict[str, Kind] = {"blocks": LAYERS, **dict.fromkeys(("inner", "rank"), WIDTH), "attention": Flag()}
_SHORT_CONV: dict[str, Kind] = {"kernel": KERNEL, "rank": HEADS}
_ALTERNATING: dict[str, Kind] = {
    **dict.fromkeys(("streams", "rank"), HEADS),
    "active": Whole(0, HEADS.most),
    "scaled": Flag(),
}
_TEMPERATURE: dict[str, Kind] = {
    "scale": Number(0.0, 1e6),
    **dict.fromkeys(("length", "offset"), Whole(0, POSITIONS.most)),
    "unturned": Flag(),
}
_CONFIG: dict[str, Kind] = {
    "vocab_size": TOKENS,
    "hidden_size": WIDTH,
    "intermediate_size": Whole(0, WIDTH.most),
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_positions": POSITIONS,
    "family": Text(64),
    "norm_eps": EPS,
    "rope": Record(_ROPE),
    "local_rope": Record(_ROPE),
    "sliding_window": POSITIONS,
    **dict.fromkeys(("sliding_layers", "local_rope_layers"), Listed(Flag(), MOST_LAYERS)),
    **{name: Flag() for name in ("tie_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "causal")},
    **dict.fromkeys(("sandwich_norms", "shifted", "shortcuts"), Flag()),
    "mamba": Record(_MAMBA),
    "selective": Record(_SELECTIVE),
    "delta": Record(_DELTA),
    "temperature": Record(_TEMPERATURE),
    **dict.fromkeys(("state_layers", "attending_layers", "conv_layers", "dense_layers"), Listed(Flag(), MOST_LAYERS)),
    **dict.fromkeys(("mixing_layers", "mlp_layers"), Listed(Flag(), MOST_LAYERS)),
    **dict.fromkeys(("unit_norms", "chunked", "scaled_inputs"), Flag()),
    "group_best": EXPERTS,
    "gated_conv": Whole(0, KERNEL.most),
    "shared": Record(_SHARED),
    "latent": Record(_LATENT),
    "short_conv": Record(_SHORT_CONV),
    **dict.fromkeys(("experts_scale", "residual_scale"), SCALE),
    **dict.fromkeys(("attention_cap", "logit_cap"), Number(0.0, 1e6)),
    "experts_floor": Listed(Number(0.0, 1e30), MOST_LAYERS),
    **dict.fromkeys(("shared_inner", "dense_inner"), Whole(0, WIDTH.most)),
    "block_length": BLOCK,
    "mask_id": TOKEN_ID,
    "activation": Text(64),
    "embedding_scale": SCALE,
    "attention_scale": SCALE,
    "bos_id": TOKEN_ID,
    **dict.fromkeys(("eos_ids", "image_tokens"), Listed(TOKEN_ID, 1 << 16)),
    "kept_tokens": Whole(0, TOKENS.most),
    "vocabulary": Text(256),
    "exits": Listed(LAYERS, MOST_LAYERS),
    **dict.fromkeys(("experts", "experts_per_token"), EXPERTS),
    **dict.fromkeys(("centred_norms", "norms_after", "parallel", "gated", "wide_qk_norm", "learned_positions"), Flag()),
    **dict.fromkeys(("normed_experts", "summed_experts", "joined_norms", "operators"), Flag()),
    **dict.fromkeys(("norms_after_rope", "sinks", "head_bias", "sigmoid_router", "router_bias"), Flag()),
    **dict.fromkeys(("choice_bias", "shared_gate", "expert_bias", "gated_attention"), Flag()),
    **dict.fromkeys(("expert_groups", "taken_groups"), EXPERTS),
    **dict.fromkeys(("experts_beside", "unit_values", "keys_as_values", "layer_scales"), Flag()),
    "head_shapes": Listed(Listed(HEAD_DIM, 2), MOST_LAYERS),
    "inners": Listed(WIDTH, MOST_LAYERS),
    "sparsity": Listed(Number(0.0, 1.0), MOST_LAYERS),
    **dict.fromkeys(("reused_layers", "layer_inputs", "layer_tokens"), Whole(0, TOKENS.most)),
    "alternating": Record(_ALTERNATING),
}
_TUPLES = (
    "sliding_layers",
    "local_rope_layers",
    "state_layers",
    "conv_layers",
    "dense_layers",
    "mixing_layers",
    "mlp_layers",
    "attending_layers",
    "eos_ids",
    "image_tokens",
    "exits",
    "experts_floor",
    "inners",
    "sparsity",
)
_PARTS: dict[str, tuple[type, dict[str, Kind]]] = {
    "mamba": (Mamba, _MAMBA),
    "selective": (Selective, _SELECTIVE),
    "delta": (GatedDelta, _DELTA),
    "shared": (Shared, _SHARED),
    "short_conv": (ShortConv, _SHORT_CONV),
    "latent": (Latent, _LATENT),
    "temperature": (Temperature, _TEMPERATURE),
    "alternating": (Alternating, _ALTERNATING),
}
_DESCRIPTION: dict[str, Kind] = {
    "config": Record(_CONFIG),
    "precision": Text(64),
    "special": Named(Text(), 1 << 12),
    "chat_template": Text(1 << 20),
    "tokenizer_of": Text(),
    "source": _SOURCE,
}


@dataclass(frozen=True)
class Description:
    """A model's configuration, the precision of its checkpoint, and what `TextFacts` says of its texts.

    Attributes:
        tokenizer_of: The model whose tokenizer it uses, None where it has its own.
        source: What it was converted from, a file, a folder or what can be fetched again; None if unknown.
    """

    config: ModelConfig
    precision: str
    special: dict[str, str]
    chat_template: str | None
    tokenizer_of: str | None = None
    source: str | None = None

    def text(self) -> str:
        """As JSON, which `read` reads."""
        values = dataclasses.asdict(self)
        return json.dumps({name: value for name, value in values.items() if value is not None})

    @classmethod
    def read(cls, path: Path) -> Description:
        """Raises CorruptFile for anything that `text` did not write."""
        try:
            fields = Fields(read_json(path), str(path), _DESCRIPTION)
            config = _config(fields.need("config"), f"{path}: config")
        except CorruptFile as error:
            raise CorruptFile(f"{error}; remove the folder {path.parent} and load or make it again") from error
        return cls(
            config,
            fields.need("precision"),
            fields.get("special", {}),
            fields.get("chat_template"),
            fields.get("tokenizer_of"),
            fields.get("source"),
        )


def noted(path: Path) -> str | None:
    """A path as a description holds it, None where it cannot: names of files need not be text."""
    whole = str(path.resolve())
    return whole if _SOURCE.fits(whole) else None


def _config(raw: dict[str, Any], origin: str) -> ModelConfig:
    fields = Fields(raw, origin, _CONFIG)
    values = _values(ModelConfig, fields)
    values |= {name: _rope(fields.get(name), origin) for name in ("rope", "local_rope")}
    values |= {name: tuple(fields.get(name, [])) for name in _TUPLES}
    values["head_shapes"] = tuple(tuple(shape) for shape in fields.get("head_shapes", []))
    for name, (part, kinds) in _PARTS.items():
        values[name] = _made(part, fields.get(name), kinds, f"{origin}: {name}")
    config = ModelConfig(**{name: value for name, value in values.items() if value is not None})
    check_config(config, origin)
    return config


def _made(part: type, raw: dict[str, Any] | None, kinds: dict[str, Kind], origin: str) -> Any:
    """A part of a configuration, None where there is none."""
    if raw is None:
        return None
    values = _values(part, Fields(raw, origin, kinds))
    return part(**{name: value for name, value in values.items() if value is not None})


def _values(made: Any, fields: Fields) -> dict[str, Any]:
    """What a file says of the fields of a dataclass; of those that have a default it need say nothing."""
    if foreign := fields.raw.keys() - fields.kinds.keys():
        raise CorruptFile(f"{fields.origin}: {min(foreign)} is none of the fields of a configuration")
    return {
        field.name: (fields.need if _required(field) else fields.get)(field.name) for field in dataclasses.fields(made)
    }


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _rope(raw: dict[str, Any] | None, origin: str) -> Rope | None:
    if raw is None:
        return None
    values = {name: value for name, value in raw.items() if name in _ROPE and value is not None}
    rope = Rope(**{**values, "factors": tuple(values.get("factors", ()))})
    if rope.kind not in ("default", "none", "linear", "llama3", "yarn", "factors", "proportional"):
        raise CorruptFile(f"{origin}: there is no rotation of kind {rope.kind!r}")
    if rope.kind == "yarn" and not rope.original_max_positions:
        raise CorruptFile(f"{origin}: the rotation stretches nothing")
    return rope
