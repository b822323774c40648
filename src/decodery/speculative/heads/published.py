"""Heads that others have published, by their layout: EAGLE's, EAGLE-3's, vLLM `speculators`', Medusa's and Hydra's.

Names and shapes are those of the public code (SafeAILab/EAGLE, vllm-project/speculators; for the others see
`published_mlp`); whatever could not be run faithfully is refused by name.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import UnsupportedModel
from decodery.models.config import TOKENS, WIDTH, ModelConfig
from decodery.models.families.config_json import read_config
from decodery.models.loaders.config_keys import refuse_unknown
from decodery.models.loaders.fields import Anything, Fields, Flag, Kind, Listed, Record, Text, Whole, read_json
from decodery.models.torch.rope import rope_frequencies
from decodery.models.trained.artifact import remembered, sampled

from . import published_mlp
from .checkpoint import CONFIG, EMBEDDING, Tensors, refuse_pickle, weights_of
from .copied import layer_shape
from .head import OWN_EMBEDDING, TrainedHead
from .parts import LayerShape

_SPECULATORS = "speculators_model_type"
_FAMILIES = ("llama", "qwen2", "mistral")
_MLPS = {
    "medusa": ("medusa", published_mlp.medusa),
    "medusa of vLLM": ("medusa", published_mlp.vllm_medusa),
    "hydra": ("hydra", published_mlp.hydra),
}
_TAPS = Listed(Whole(-(1 << 10), 1 << 10), 64)
_OUTPUTS = Listed(Whole(0, 1 << 10), 64)
_SETTINGS: dict[str, Kind] = {
    _SPECULATORS: Text(64),
    "transformer_layer_config": Record({}),
    "layernorms": Flag(),
    "norm_before_residual": Flag(),
    "norm_before_fc": Flag(),
    "draft_vocab_size": TOKENS,
    "eagle_aux_hidden_state_layer_ids": _TAPS,
    "eagle_config": Record({"eagle_aux_hidden_state_layer_ids": _OUTPUTS, "use_aux_hidden_state": Flag()}),
    "model_type": Text(64),
    "norm_output": Flag(),
    "target_hidden_size": WIDTH,
    "sliding_window": Anything(),
    "use_sliding_window": Flag(),
}
_UNREAD = ("bias", "fusion_bias", "speculators_config", "speculators_version", "embed_requires_grad")
"""What tensors say as well, what the head was made for and with, and how."""
_OF_MLPS = (
    *published_mlp.SETTINGS,
    *("base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len", "lm_head_init_method", "dropout_rate"),
)


def published(folder: Path) -> TrainedHead:
    """The head of a folder with a `config.json`.

    Raises:
        UnsupportedModel: For a layout that is not known, by its name.
        CorruptFile: If something is missing.
        ModelNotFound: If there are no safetensors.
    """
    weights = weights_of(folder)
    if weights is None:
        named = _named(_settings(folder))
        raise refuse_pickle(folder, f"{named}_lm_head.safetensors" if named else "model.safetensors")
    return _read(folder)


@remembered
def _read(folder: Path) -> TrainedHead:
    weights = weights_of(folder)
    assert weights is not None
    settings, tensors = _settings(folder), Tensors(weights)
    layout = _layout(settings, tensors)
    if layout in _MLPS:
        refuse_unknown(settings.raw, settings.origin, _OF_MLPS)
        kind, read = _MLPS[layout]
        found, about = read(Fields(settings.raw, settings.origin, published_mlp.SETTINGS), tensors)
    else:
        if layout.startswith("speculators"):
            refuse_unknown(settings.raw, settings.origin, (*_SETTINGS, *_UNREAD, "tie_word_embeddings"))
        _refuse_unheeded(settings)
        config = _layer_config(settings, of_its_own=layout.startswith("speculators"))
        if layout.endswith("eagle3"):
            kind, (found, about) = "eagle-3", _eagle_3(settings, config, tensors)
        else:
            kind, (found, about) = "eagle", _eagle(settings, config, tensors, layout)
        if EMBEDDING in tensors:
            # The target has the same, which is looked at once it is known.
            table = tensors.take(EMBEDDING, config.vocab_size, config.hidden_size)
            found[OWN_EMBEDDING] = table[sampled(table.device, len(table))].clone()
        about = {"layer": asdict(_shape(config))} | about
    tensors.refuse_rest(layout)
    return TrainedHead(kind, found, about, {"layout": layout})


def _settings(folder: Path) -> Fields:
    return Fields(read_json(folder / CONFIG), str(folder / CONFIG), _SETTINGS)


def _named(settings: Fields) -> str | None:
    """Of which kind of MLPs a configuration is, if of any."""
    if "hydra_num_heads" in settings.raw:
        return "hydra"
    return "medusa" if "medusa_num_heads" in settings.raw or settings.get("model_type") == "medusa" else None


def _layout(settings: Fields, tensors: Tensors) -> str:
    """The name of a checkpoint's layout."""
    kind, named = settings.get(_SPECULATORS), _named(settings)
    if kind in ("eagle", "eagle3"):
        return f"speculators {kind}"
    if named == "hydra":
        return "hydra"
    if named == "medusa" and "0.0.linear.weight" in tensors:
        return "medusa"
    if named == "medusa" and "blocks.0.layers.0.weight" in tensors:
        return "medusa of vLLM"
    if kind is None and "midlayer.self_attn.q_proj.weight" in tensors:
        return "eagle3"
    if kind is None and "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        # Some write EAGLE-3's layer under the name of EAGLE's; it has a norm of its own for the states.
        return "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    unknown = kind or settings.raw.get("architectures") or settings.raw.get("model_type")
    raise UnsupportedModel(
        f"{settings.origin}: {unknown or tensors.first} is no layout of a draft head that is known here, which are "
        "EAGLE's, EAGLE-3's, Medusa's (also vLLM's) and Hydra's, and eagle and eagle3 of speculators"
    )


def _refuse_unheeded(settings: Fields) -> None:
    """Raise UnsupportedModel for what some heads do and is not run here, by its name."""
    own = Fields(settings.get("transformer_layer_config") or settings.raw, settings.origin, _SETTINGS)
    for fields in (settings, own):
        for name in ("norm_output", "layernorms", "norm_before_fc"):
            if fields.get(name):
                raise fields.unsupported(name)
        if fields.get("sliding_window") and fields.get("use_sliding_window", True):
            raise fields.unsupported("sliding_window")
    hidden = Fields(own.raw, own.origin, {"hidden_size": WIDTH}).get("hidden_size")
    if (target := settings.get("target_hidden_size")) is not None and target != hidden:
        raise UnsupportedModel(
            f"{settings.origin}: target_hidden_size = {target} and hidden_size = {hidden}: a head that is not as wide "
            "as its target is not supported"
        )
    if not (settings.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise settings.unsupported("eagle_config")


def _layer_config(settings: Fields, *, of_its_own: bool) -> ModelConfig:
    """The configuration of a head's layer, which is written as that of a model. of_its_own: in a record."""
    raw, origin = settings.raw, settings.origin
    if of_its_own:
        raw = settings.get("transformer_layer_config") or {}
    heads = {*_SETTINGS, *_UNREAD} - {"model_type", "sliding_window", "use_sliding_window"}
    known = {name: value for name, value in raw.items() if name != "architectures" and name not in heads}
    family = known.setdefault("model_type", "llama")
    if family not in _FAMILIES:
        raise UnsupportedModel(f"{origin}: a head whose layer is of model_type {family!r} is not known here")
    config = read_config(known, origin)
    if config.num_layers != 1:
        raise UnsupportedModel(f"{origin}: num_hidden_layers = {config.num_layers}, and heads have one layer here")
    if config.activation != "silu":
        raise UnsupportedModel(f"{origin}: hidden_act of a head is silu here, not {config.activation}")
    return config


def _shape(config: ModelConfig) -> LayerShape:
    if rope_frequencies(config.rope, config.head_dim)[1] != 1.0:
        raise UnsupportedModel(f"a head whose rotary positions are stretched by {config.rope.kind} is not known here")
    return layer_shape(config, 0)


def _layer(tensors: Tensors, prefix: str, config: ModelConfig, width: int) -> dict[str, torch.Tensor]:
    return tensors.layer(
        prefix,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        own=config.num_heads * config.head_dim,
        shared=config.num_kv_heads * config.head_dim,
        width=width,
    )


def _eagle(
    settings: Fields, config: ModelConfig, tensors: Tensors, layout: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    prefix, fc = ("transformer.", "fusion_fc") if layout.startswith("speculators") else ("layers.0.", "fc")
    hidden = config.hidden_size
    return _layer(tensors, prefix, config, hidden) | tensors.linear("fc", {fc: hidden}, 2 * hidden), {}


def _eagle_3(settings: Fields, config: ModelConfig, tensors: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
    hidden, outputs = config.hidden_size, settings.get("draft_vocab_size", config.vocab_size)
    found = _layer(tensors, prefix, config, 2 * hidden)
    found |= tensors.linear("lm_head", {"lm_head": outputs}, hidden)
    entering = settings.get("eagle_aux_hidden_state_layer_ids")
    leaving = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # As published: the states that enter layers 2, the middle one and the third from the end. speculators numbers the
    # layers that they enter, SpecForge those that they leave.
    taps = entering or [layer + 1 for layer in leaving or ()] or [2, "half", -4]
    found |= tensors.linear("fc", {"fc": hidden}, len(taps) * hidden)
    for name, theirs in (("token_norm", "input_layernorm"), ("feature_norm", "hidden_norm")):
        found[f"{name}.weight"] = tensors.take(f"{prefix}{theirs}.weight", hidden)
    found["norm.weight"] = tensors.take("norm.weight", hidden)
    if "d2t" in tensors:
        found["vocabulary"] = (torch.arange(outputs, device="cpu") + tensors.take("d2t", outputs)).int()
    return found, {"taps": taps, "norm_before_residual": settings.get("norm_before_residual", False)}
