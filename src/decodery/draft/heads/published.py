"""Heads that others have published: EAGLE's and EAGLE-3's own checkpoints, and those of vLLM's `speculators`.

A folder of config.json and model.safetensors. Names and shapes are those of the public code (SafeAILab/EAGLE,
vllm-project/speculators); whatever could not be run faithfully is refused by name.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...errors import CorruptFile, ModelNotFound, UnsupportedModel
from ...model.artifact import read_tensors, remembered
from ...model.config import TOKENS, ModelConfig
from ...model.families import read_config
from ...model.fields import Fields, Flag, Kind, Listed, Record, Text, Whole, read_json
from ...model.rope import rope_frequencies
from .head import TrainedHead
from .parts import LayerShape

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SPECULATORS = "speculators_model_type"
_FAMILIES = ("llama", "qwen2", "mistral")
# Of the target, which has them anyway; and what anybody can work out.
_IGNORED = (
    "embed_tokens.weight",
    "t2d",
    "layers.0.self_attn.rotary_emb.inv_freq",
    "midlayer.self_attn.rotary_emb.inv_freq",
)
_TAPS = Listed(Whole(-(1 << 10), 1 << 10), 64)
_SETTINGS: dict[str, Kind] = {
    _SPECULATORS: Text(64),
    "transformer_layer_config": Record({}),
    "layernorms": Flag(),
    "norm_before_residual": Flag(),
    "norm_before_fc": Flag(),
    "draft_vocab_size": TOKENS,
    "eagle_aux_hidden_state_layer_ids": _TAPS,
    "eagle_config": Record({"eagle_aux_hidden_state_layer_ids": _TAPS}),
}
# What `transformers` leaves out of a configuration, because it is what Llama's class begins with.
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_act": "silu",
}


@remembered
def published(weights: Path) -> TrainedHead:
    """The head of a checkpoint whose `config.json` stands beside its weights.

    Raises UnsupportedModel for a layout that is not known, by its name, CorruptFile where something is missing.
    """
    folder = weights.parent
    origin = str(folder / CONFIG)
    settings = Fields(read_json(folder / CONFIG), origin, _SETTINGS)
    if not weights.is_file():
        raise ModelNotFound(
            f"there is no {WEIGHTS} in {folder}: heads published as pytorch_model.bin can run code when they are read, "
            "so save their tensors as safetensors first"
        )
    tensors = _Tensors(folder, read_tensors(weights)[0])
    layout = _layout(settings, tensors)
    own = settings.get("transformer_layer_config") if layout.startswith("speculators") else settings.raw
    config = _layer_config(own, origin)
    if layout.endswith("eagle3"):
        found, about = _eagle_3(settings, config, tensors)
    else:
        found, about = _eagle(settings, config, tensors, layout)
    tensors.refuse_rest(layout)
    kind = "eagle-3" if layout.endswith("eagle3") else "eagle"
    return TrainedHead(kind, found, {"layer": asdict(_shape(config))} | about, {"layout": layout})


class _Tensors:
    """The tensors of a checkpoint; each is taken once."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.folder = folder
        self._left = {name: each for name, each in tensors.items() if name not in _IGNORED}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._left:
            raise CorruptFile(f"{self.folder / WEIGHTS} lacks the tensor {name}: fetch the head anew")
        found = self._left.pop(name)
        if tuple(found.shape) != shape:
            raise CorruptFile(
                f"{self.folder / WEIGHTS}: {name} is {list(found.shape)}, and {CONFIG} says {list(shape)}"
            )
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise CorruptFile(f"{self.folder / WEIGHTS}: {name} holds numbers that are not finite: fetch the head anew")
        return found

    def linear(self, name: str, parts: dict[str, int], width: int) -> dict[str, torch.Tensor]:
        """One linear layer of several, stacked, and their biases where they have some. parts: outputs by name."""
        found = {f"{name}.weight": torch.cat([self.take(f"{part}.weight", n, width) for part, n in parts.items()])}
        if any(f"{part}.bias" in self for part in parts):
            found[f"{name}.bias"] = torch.cat([self.take(f"{part}.bias", n) for part, n in parts.items()])
        return found

    def layer(self, prefix: str, config: ModelConfig, width: int) -> dict[str, torch.Tensor]:
        """A decoder layer, but the norms before its attention. width: of what attention reads."""
        hidden, inner = config.hidden_size, config.intermediate_size
        own, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = dict(zip((f"{prefix}self_attn.{each}_proj" for each in "qkv"), (own, shared, shared), strict=True))
        return {
            **self.linear("layer.qkv", heads, width),
            **self.linear("layer.output", {f"{prefix}self_attn.o_proj": hidden}, own),
            **self.linear("layer.gate_up", {f"{prefix}mlp.{each}_proj": inner for each in ("gate", "up")}, hidden),
            **self.linear("layer.down", {f"{prefix}mlp.down_proj": hidden}, inner),
            "layer.mlp_norm.weight": self.take(f"{prefix}post_attention_layernorm.weight", hidden),
        }

    def refuse_rest(self, layout: str) -> None:
        """A tensor that would not be used means a part that would not be run."""
        for name in self._left:
            raise UnsupportedModel(
                f"{self.folder}: the tensor {name} belongs to a part that heads of the layout {layout} are not known "
                "to have"
            )


def _layout(settings: Fields, tensors: _Tensors) -> str:
    """The name of a checkpoint's layout."""
    kind = settings.get(_SPECULATORS)
    if kind in ("eagle", "eagle3"):
        return f"speculators {kind}"
    if kind is None and "midlayer.self_attn.q_proj.weight" in tensors:
        return "eagle3"
    if kind is None and "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        # Some write EAGLE-3's layer under the name of EAGLE's; it has a norm of its own for the states.
        return "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    named = kind or settings.raw.get("architectures") or settings.raw.get("model_type")
    raise UnsupportedModel(
        f"{settings.origin}: {named} is no layout of a draft head that is known here, which are EAGLE's, EAGLE-3's, "
        "and eagle and eagle3 of speculators"
    )


def _layer_config(raw: Any, origin: str) -> ModelConfig:
    """The configuration of a head's layer, which is written as that of a model."""
    known = {name: value for name, value in (raw or {}).items() if name != "architectures"}
    family = known.get("model_type", "llama")
    if family not in _FAMILIES:
        raise UnsupportedModel(f"{origin}: a head whose layer is of model_type {family!r} is not known here")
    config = read_config((_LLAMA if family == "llama" else {}) | known, origin)
    if config.num_layers != 1:
        raise UnsupportedModel(f"{origin}: num_hidden_layers = {config.num_layers}, and heads have one layer here")
    if config.activation != "silu":
        raise UnsupportedModel(f"{origin}: hidden_act of a head is silu here, not {config.activation}")
    return config


def _shape(config: ModelConfig) -> LayerShape:
    inverse, factor = rope_frequencies(config.rope, config.head_dim)
    if factor != 1.0:
        raise UnsupportedModel(f"a head whose rotary positions are stretched by {config.rope.kind} is not known here")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    stretch = (1.0 / config.rope.theta**exponents / inverse.double()).tolist()
    return LayerShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rope.theta,
        config.norm_eps,
        stretch=() if config.rope.kind == "default" else tuple(stretch),
    )


def _eagle(
    settings: Fields, config: ModelConfig, tensors: _Tensors, layout: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if settings.get("layernorms"):
        raise settings.unsupported("layernorms")
    prefix, fc = ("transformer.", "fusion_fc") if layout.startswith("speculators") else ("layers.0.", "fc")
    hidden = config.hidden_size
    return tensors.layer(prefix, config, hidden) | tensors.linear("fc", {fc: hidden}, 2 * hidden), {}


def _eagle_3(
    settings: Fields, config: ModelConfig, tensors: _Tensors
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if settings.get("norm_before_fc"):
        raise settings.unsupported("norm_before_fc")
    prefix = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
    hidden, outputs = config.hidden_size, settings.get("draft_vocab_size", config.vocab_size)
    found = tensors.layer(prefix, config, 2 * hidden)
    found |= tensors.linear("lm_head", {"lm_head": outputs}, hidden)
    named = settings.get("eagle_aux_hidden_state_layer_ids")
    named = named or (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # As published: the states that enter layers 2, the middle one and the third from the end.
    taps = named or [2, "half", -4]
    found |= tensors.linear("fc", {"fc": hidden}, len(taps) * hidden)
    for name, theirs in (("token_norm", "input_layernorm"), ("feature_norm", "hidden_norm")):
        found[f"{name}.weight"] = tensors.take(f"{prefix}{theirs}.weight", hidden)
    found["norm.weight"] = tensors.take("norm.weight", hidden)
    if "d2t" in tensors:
        found["vocabulary"] = (torch.arange(outputs) + tensors.take("d2t", outputs)).int()
    return found, {"taps": taps, "norm_before_residual": settings.get("norm_before_residual", False)}
