"""All families that a table of names and switches tells from Llama's: their configurations and tensors."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import ModelConfig
from ..loaders.fields import Fields
from .dense import DENSE
from .family import KINDS, Family, Raw
from .gated import GATED_DELTA
from .gemma import GEMMA
from .mixed import MIXED
from .recurrent import RECURRENT
from .routed import ROUTED
from .selective import SELECTIVE

SWITCHED: dict[str, Family] = {**DENSE, **MIXED, **ROUTED, **GATED_DELTA, **RECURRENT, **SELECTIVE, **GEMMA}
_WINDOWS = ("sliding_window", "layer_types", "use_sliding_window")


def restated(raw: Raw, family: str, origin: str) -> tuple[Raw, Raw]:
    """A configuration in Llama's names, and further fields of `ModelConfig`."""
    own = SWITCHED[family]
    if raw.get("sliding_window") == 0:
        # As some say that there is none.
        raw = raw | {"sliding_window": None}
    found = {own.names.get(name, name): value for name, value in raw.items() if value is not None}
    if "rope_theta" not in found:
        found["rope_theta"] = own.theta
    fields = Fields(raw | {"rope_theta": found["rope_theta"]}, origin, {**KINDS, **own.fields})
    derived = {} if own.derived is None else own.derived(fields, found)
    read = {*own.fields, *_WINDOWS} - {"intermediate_size", "num_key_value_heads"}
    return {name: value for name, value in found.items() if name not in read}, {**own.switches, **derived}


def switched_name(name: str, layer: str | None, kind: str, config: ModelConfig) -> str | None:
    """What these families call a part of layer number `layer`, or of the whole model.

    None: what Llama's call it.
    """
    own = SWITCHED[config.family]
    if layer is None:
        return f"{own.whole[name]}.{kind}" if name in own.whole else None
    if name in own.convolving and config.convolves(int(layer)):
        return f"{own.layers}.{layer}.{own.convolving[name]}.{kind}"
    if name in own.recurrent and config.recurrent(int(layer)):
        return f"{own.layers}.{layer}.{own.recurrent[name]}"
    if name in own.exact:
        return f"{own.layers}.{layer}.{own.exact[name]}"
    if name.startswith("experts.") and own.experts:
        return f"{own.layers}.{layer}.{expert_name(name, own.experts, kind)}"
    return f"{own.layers}.{layer}.{own.parts[name]}.{kind}" if name in own.parts else None


def expert_name(name: str, names: Mapping[str, str], kind: str) -> str:
    """What a checkpoint calls a part such as "experts.3.gate".

    Args:
        names: By half, what it calls that of an expert, where {} is its number.
    """
    _, number, half = name.split(".")
    return f"{names[half].format(number)}.{kind}"


def factors(raw: Raw, config: ModelConfig) -> dict[str, float]:
    """By part of a layer, or of the whole model, what its weights are multiplied by as they are read."""
    scaling = raw.get("logits_scaling") if config.family.startswith("granite") else None
    # Before the head, whose table may be the embeddings' too.
    return {} if scaling is None else {"norm": 1.0 / scaling}
