"""Language models beside a vision tower: which part of a configuration is theirs."""

from __future__ import annotations

from typing import Any

from ..loaders.fields import Fields, Record, Text
from .family import Raw

_SMALL = {
    **{"head_dim": 128, "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9},
    **{"max_position_embeddings": 131_072, "sliding_window": None, "vocab_size": 131_072},
}
_QWEN2 = {
    **{"hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768, "vocab_size": 152_064},
    **{"rope_theta": 1e6, "max_window_layers": 80},
}
_QWEN3 = {
    **{"hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 128_000},
    **{"rope_theta": 5e5, "vocab_size": 151_936},
}
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("llava", "llava_next"), ("llama", {})),
    "mistral3": ("mistral", _SMALL),
    **{name: (f"{name}_text", {}) for name in ("qwen3_5", "qwen3_5_moe")},
    "llama4": ("llama4_text", {}),
    **{name: (f"{name}_text", {}) for name in ("gemma3", "gemma3n", "gemma4", "gemma4_unified")},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("qwen2", _QWEN2)),
    "qwen3_vl": ("qwen3", _QWEN3),
}
"""Language models beside a vision tower, whose configuration is a part of theirs and whose images are embeddings.

With the family that they have where they name none, and what it is then.
"""
_TIED = ("mistral3", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma3n", "gemma4", "gemma4_unified")
_QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_IMAGE_TOKENS: dict[str, dict[str, int]] = {
    **{"gemma3": {"image_token_index": 262_144}, "paligemma": {"image_token_index": 256_000}},
    "gemma3n": {"image_token_id": 262_145, "audio_token_id": 262_273},
    **{
        name: {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
        for name in ("gemma4", "gemma4_unified")
    },
    **{name: {"image_token_id": 151_655, "video_token_id": 151_656} for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    **{name: {"image_token_id": 248_056, "video_token_id": 248_057} for name in ("qwen3_5", "qwen3_5_moe")},
}
"""By model type, the placeholders of what is not read as text is, and their ids where a configuration leaves them out.

Rows of an image see each other (Gemma 3, PaliGemma), have inputs of every layer (Gemma 3n and 4) or positions on three
axes (Qwen).
"""
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How rotation is split between places in an image, which are one and the same place of a text."""


def language_part(raw: Any, origin: str) -> tuple[str, Raw]:
    """The family of the language model of a configuration in `SEEING`, and its own configuration."""
    named = Fields(raw, origin, {"model_type": Text(64)}).need("model_type")
    inner: Raw = Fields(raw, origin, {"text_config": Record({})}).get("text_config") or {}
    family, given = SEEING[named]
    if named in _QWEN_VL:
        # The first files have both parts in one.
        inner = inner or {name: value for name, value in raw.items() if not _is_seen(name)}
        fields = Fields(inner, f"{origin}: text_config", {"model_type": Text(64)})
        if fields.get("model_type", family) not in (family, named, f"{named}_text"):
            raise fields.unsupported("model_type")
        tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))}
        return family, of_text(given | inner) | tied | {"model_type": family}
    inner = Fields(raw, origin, {"text_config": Record({})}).need("text_config")
    tied = {}
    if named in _TIED:
        tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", not named.startswith("qwen"))}
    if (own := Fields(inner, f"{origin}: text_config", {"model_type": Text(64)}).get("model_type")) is None:
        own, inner = family, given | inner
    # Whether there is one table for both is said beside the parts.
    return own, inner | {"model_type": own} | tied


def image_tokens(raw: Raw) -> tuple[int, ...]:
    """Ids of the placeholders in whose places a model reads images otherwise than this package would.

    Args:
        raw: The configuration of a model, or of its language model alone.
    """
    # What is of another type than it should be is refused where it is read.
    named, text = str(raw.get("model_type")).removesuffix("_text"), raw.get("text_config")
    ropes = ((text if isinstance(text, dict) else raw).get(name) for name in ("rope_parameters", "rope_scaling"))
    turned = any(isinstance(rope, dict) and "mrope_section" in rope for rope in ropes)
    if named not in _IMAGE_TOKENS and not turned:
        return ()
    given: Raw = _IMAGE_TOKENS.get(named, {}) | raw
    names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
    return tuple(found for name in names if isinstance(found := given.get(name), int))


def _is_seen(name: str) -> bool:
    """Whether a field is of images, or of both parts."""
    return name in ("vision_config", "architectures") or (
        name.endswith("_token_id") and name.startswith(("image", "video", "vision"))
    )


def of_text(raw: Raw) -> Raw:
    """A configuration whose rotation is that of texts."""
    found = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(name), dict):
            own = {key: value for key, value in raw[name].items() if key not in OF_IMAGES}
            found[name] = {key: "default" if value == "mrope" else value for key, value in own.items()}
    return found
