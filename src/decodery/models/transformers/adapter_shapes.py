"""What a model of `transformers` is like: its sizes and windows, learnt from its configuration and one token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decodery.core.errors import UnsupportedModel

from ..config import ModelConfig
from ..families.config_json import token_ids

INSTEAD = "use generate() of transformers itself, or a model of another architecture"
"""What to do where a model cannot be decoded through this package."""

CACHE_NAMES = ("cache", "past_key_values")
"""What `transformers` calls a cache, as an argument and in what a model returns: from 5.24 on the first."""

_KINDS = ("full_attention", "sliding_attention")
_WINDOWS = ("window", "local", "chunk")


@torch.no_grad()
def read_shapes(hf_model: PreTrainedModel) -> ModelConfig:
    """The shapes of a model's cache, layer by layer.

    Raises:
        UnsupportedModel: If a layer keeps anything but a key and a value per token, or reads them in an unknown way.
    """
    name, config = type(hf_model).__name__, hf_model.config.get_text_config()
    output = hf_model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=hf_model.device), use_cache=True)
    kept = next((each for name in CACHE_NAMES if (each := getattr(output, name, None)) is not None), None)
    slots = getattr(kept, "layers", [])
    # A state-space or quantized layer has no plain tensors here and counts as None.
    pairs = [(getattr(slot, "keys", None), getattr(slot, "values", None)) for slot in slots]
    shapes = {
        tuple(keys.shape) if keys is not None and values is not None and keys.shape == values.shape else None
        for keys, values in pairs
    }
    shape = next(iter(shapes), None)
    if len(shapes) != 1 or shape is None:
        raise UnsupportedModel(f"{name} keeps a state other than one key and one value per token and layer: {INSTEAD}")
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds and not set(kinds) <= set(_KINDS):
        raise UnsupportedModel(f"{name} has layers of the kinds {', '.join(sorted(set(kinds)))}: {INSTEAD}")
    sliding = [kind == _KINDS[1] for kind in kinds] if kinds else [window is not None] * len(slots)
    embeddings: Any = hf_model.get_input_embeddings()
    begins = token_ids(getattr(config, "bos_token_id", None))
    return ModelConfig(
        vocab_size=output.logits.shape[-1],
        hidden_size=embeddings.weight.shape[1],
        intermediate_size=getattr(config, "intermediate_size", None) or 0,
        num_layers=len(slots),
        num_heads=getattr(config, "num_attention_heads", shape[1]),
        num_kv_heads=shape[1],
        head_dim=shape[3],
        max_positions=_max_positions(config),
        family=config.model_type,
        sliding_window=window if any(sliding) else None,
        sliding_layers=tuple(sliding),
        bos_id=begins[0] if begins else None,
        eos_ids=token_ids(getattr(config, "eos_token_id", None)),
    )


def windows_of(config: PreTrainedConfig) -> list[int]:
    """Numbers of tokens in a configuration that may mean a window, shortest first."""
    named = (value for name, value in config.to_dict().items() if any(word in name for word in _WINDOWS))
    return sorted({number for value in named for number in _whole_numbers(value) if number > 1})


def _max_positions(config: Any) -> int:
    """Tokens of a text at most: those whose keys stay what they are as the text goes on."""
    most = getattr(config, "max_position_embeddings", None) or 2**31 - 1
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        # After the original context every key would have to be rotated anew.
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            most = min(most, original or getattr(config, "original_max_position_embeddings", None) or most)
    return int(most)


def _whole_numbers(value: Any) -> Iterator[int]:
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, int) and not isinstance(each, bool):
            yield each
