"""What a model of `transformers` is like: its sizes and windows, learnt from its configuration and one token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decodery.core.errors import UnsupportedModel

from ..config import ModelConfig
from ..families.config_json import token_ids
from ..families.seeing import image_tokens
from .adapter_call import INSTEAD

CACHE_NAMES = ("cache", "past_key_values")
"""What `transformers` calls a cache of keys and values: from 5.24 on the first."""
STATE_NAMES = (*CACHE_NAMES, "cache_params", "state", "mems")
"""What it calls what a model keeps, as an argument and in what a model returns."""
TOKEN_WIDTH = 4
"""Numbers in a row of a cache that holds tokens."""

_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_WINDOWS = ("window", "local", "chunk")
_PERIODS = (*_WINDOWS, "compress", "topk", "block", "stride")


@dataclass(frozen=True)
class Shapes:
    """What a cache of keys and values is like.

    Attributes:
        config: Sizes of the model and of its `KVCache`.
        rows: By layer, heads and width of its keys, and of its values.
        kinds: What its layers read: all that is before a row, a window of it, or a chunk.
        chunk: Positions in a chunk.
    """

    config: ModelConfig
    rows: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    kinds: tuple[str, ...]
    chunk: int


@torch.no_grad()
def read_shapes(hf_model: PreTrainedModel, *, windowed: bool = True) -> Shapes:
    """The shapes of a model's cache, layer by layer.

    Args:
        hf_model: The model.
        windowed: Whether a window holds for all layers where the configuration does not say for which; some models
            have a window in their configuration and do not use it.

    Raises:
        UnsupportedModel: If a layer keeps anything but a key and a value per token, or reads them in an unknown way.
    """
    name, config = type(hf_model).__name__, hf_model.config.get_text_config(decoder=True)
    output = hf_model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=hf_model.device), use_cache=True)
    kept = next((each for name in CACHE_NAMES if (each := getattr(output, name, None)) is not None), None)
    slots = getattr(kept, "layers", [])
    rows = [row for slot in slots if (row := _row(slot)) is not None]
    if not rows or len(rows) < len(slots):
        raise UnsupportedModel(f"{name} keeps a state other than one key and one value per token and layer: {INSTEAD}")
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds and not set(kinds) <= set(_KINDS):
        raise UnsupportedModel(f"{name} has layers of the kinds {', '.join(sorted(set(kinds)))}: {INSTEAD}")
    kinds = kinds or [_KINDS[windowed and window is not None]] * len(slots)
    sliding = [kind == _KINDS[1] for kind in kinds]
    alike = len({shape for pair in rows for shape in pair}) == 1
    heads, width = rows[0][0] if alike else (1, max(heads * width for pair in rows for heads, width in pair))
    found = replace(
        text_config(hf_model, output.logits.shape[-1], len(slots)),
        num_heads=getattr(config, "num_attention_heads", None) or rows[0][0][0],
        num_kv_heads=heads,
        head_dim=width,
        sliding_window=window if any(sliding) else None,
        sliding_layers=tuple(sliding[: len(slots)]),
    )
    return Shapes(found, tuple(rows), tuple(sorted(set(kinds))), getattr(config, "attention_chunk_size", None) or 0)


def _row(slot: Any) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Heads and width of the keys and values that a layer keeps after one token; None where it keeps other things."""
    # A state-space or quantized layer has no plain tensors here.
    keys: Any = getattr(slot, "keys", None)
    values: Any = getattr(slot, "values", None)
    if any(each is None or each.ndim != 4 or each.shape[2] != 1 for each in (keys, values)):
        return None
    return (int(keys.shape[1]), int(keys.shape[3])), (int(values.shape[1]), int(values.shape[3]))


def text_config(hf_model: PreTrainedModel, vocab_size: int, layers: int | None = None) -> ModelConfig:
    """The sizes of a model, of whose cache nothing is known.

    Args:
        hf_model: The model.
        vocab_size: Logits of a row.
        layers: How many it has, None for what its configuration says.
    """
    config: Any = hf_model.config.get_text_config(decoder=True)
    embeddings: Any = hf_model.get_input_embeddings()
    begins = token_ids(getattr(config, "bos_token_id", None))
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=embeddings.weight.shape[1],
        intermediate_size=_number(getattr(config, "intermediate_size", None)),
        num_layers=layers or _number(getattr(config, "num_hidden_layers", None)) or 1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=TOKEN_WIDTH,
        max_positions=_max_positions(config),
        family=config.model_type,
        bos_id=begins[0] if begins else None,
        eos_ids=token_ids(getattr(config, "eos_token_id", None)),
        image_tokens=image_tokens(hf_model.config.to_dict()),
    )


def _number(value: Any) -> int:
    """An integer of a configuration; of a list, one by layer, the largest."""
    return max((each for each in (value if isinstance(value, list | tuple) else [value]) if each), default=0)


def windows_of(config: PreTrainedConfig, *, periods: bool = False) -> list[int]:
    """Numbers of tokens in a configuration that may mean a window, shortest first.

    Args:
        config: The configuration.
        periods: With those that may mean after how many tokens something else changes.
    """
    words = _PERIODS if periods else _WINDOWS
    named = (value for name, value in config.to_dict().items() if any(word in name for word in words))
    return sorted({number for value in named for number in _whole_numbers(value) if number > 1})


def _max_positions(config: Any) -> int:
    """Tokens of a text at most: those whose keys stay what they are as the text goes on."""
    most = getattr(config, "max_position_embeddings", None) or 0
    most = most if isinstance(most, int) and most > 0 else 2**31 - 1
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
