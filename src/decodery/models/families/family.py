"""What makes a family of Llama's kind its own: a table of names and switches, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decodery.core.errors import CorruptFile, UnsupportedModel

from ..config import HEAD_DIM, HEADS, LAYERS, MOST_LAYERS, POSITIONS, WIDTH
from ..loaders.fields import Fields, Kind, Listed, Text
from ..torch.rope_config import FIELDS as ROPES
from ..torch.rope_config import LAYER_TYPES

Raw = dict[str, Any]
KINDS: dict[str, Kind] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "sliding_window": POSITIONS,
    "layer_types": Listed(Text(64), MOST_LAYERS),
    **ROPES,
}


@dataclass(frozen=True)
class Family:
    """What makes a family of Llama's kind its own.

    Attributes:
        theta: Base of the rotation where a configuration has none.
        names: What Llama's configurations call its fields, where they call them otherwise.
        fields: Those that Llama's do not have.
        switches: Fields of `ModelConfig` that all of its models share.
        derived: From those fields, further ones of `ModelConfig`, and of the configuration in Llama's names.
        parts: What checkpoints call the parts of a layer, where Llama's differ, but for their endings.
        exact: The same with their endings.
        experts: Of gate, up and down of an expert, where {} is its number.
        convolving: Of a layer with a convolution in place of attention.
        recurrent: Of a layer with a state in place of attention, with their endings.
        whole: The same of parts of the whole model.
        layers: What the names of layers begin with.
    """

    theta: float = 10_000.0
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Kind] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Fields, Raw], Raw] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    convolving: Mapping[str, str] = field(default_factory=dict)
    recurrent: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"


def windows(fields: Fields, period: int = 0) -> Raw:
    """The window and which layers have it: as they are named, else all but every `period`-th one; 0: none."""
    window, layers = fields.get("sliding_window"), fields.need("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        sliding = tuple(period > 0 and (layer + 1) % period != 0 for layer in range(layers))
    else:
        if len(types) != layers:
            raise CorruptFile(f"{fields.origin}: layer_types should name a kind for each of the {layers} layers")
        if unknown := next((kind for kind in types if kind not in LAYER_TYPES), None):
            raise UnsupportedModel(f"{fields.origin}: layer_types has {unknown!r}, which is not supported here")
        sliding = tuple(kind == "sliding_attention" for kind in types)
    if window is None:
        if types is not None and any(sliding):
            raise CorruptFile(f"{fields.origin}: layers slide, and there is no sliding_window")
        sliding = (False,) * layers
    return {"sliding_window": window if any(sliding) else None, "sliding_layers": sliding}


def silu_alone(fields: Fields, raw: Raw) -> None:
    """Raise UnsupportedModel for an activation other than silu, which that of convolutions is here.

    Args:
        raw: The configuration; a missing or null field is the default of all of them.
    """
    if (raw.get("hidden_act") or "silu") != "silu":
        raise fields.unsupported("hidden_act")


def first_dense(count: int, layers: int) -> tuple[bool, ...]:
    """`ModelConfig.dense_layers` of a model whose first `count` layers are dense."""
    return tuple(layer < count for layer in range(layers))


def forget_ropes(raw: Raw) -> None:
    """Leave the rotation to fields of `ModelConfig`."""
    for name in ROPES:
        if name != "max_position_embeddings":
            raw.pop(name, None)
