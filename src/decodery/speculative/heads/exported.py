"""Heads as folders in the layout of vLLM's `speculators`: what `published` reads, written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.models.hooks import hook_point
from decodery.models.loaders.origins import origin_of
from decodery.models.loaders.store import replacing, write_text
from decodery.models.protocol import Reader
from decodery.models.torch.weights import floating

from .checkpoint import CONFIG
from .drafter import head_kind
from .head import BoundHead, TrainedHead
from .parts import LayerShape, Parts
from .published_fields import SPECULATORS
from .published_layers import SLIDING

_WEIGHTS = "model.safetensors"
_LAYER = re.compile(r"layer(_\d+)?")
_ALGORITHMS = {"eagle-3": "eagle3", "p-eagle": "peagle", "dflash": "dflash", "dspark": "dspark", "mtp": "mtp"}
_MTP = "mtp_layers.0."
_NAMES = {
    "token_norm": "layers.0.input_layernorm",
    "feature_norm": "layers.0.hidden_norm",
    "states_norm": "input_norm",
    "mask_states": "mask_hidden",
    "markov_in": "markov_head.markov_w1",
    "markov_out": "markov_head.markov_w2",
    "markov_gate": "markov_head.gate_proj",
    "markov_step": "markov_head.joint_proj",
    "confidence": "confidence_head.proj",
    **{f"states_norm.{number}": f"fc_norm.{number}" for number in range(3)},
    **{name: name for name in ("fc", "hidden_norm", "norm", "lm_head", "embed_tokens")},
}
"""What the layout calls parts of a head beside its layers."""
_OF_MTP = {
    "fc": f"{_MTP}input_proj",
    "token_norm": f"{_MTP}token_layernorm",
    "feature_norm": f"{_MTP}hidden_layernorm",
    "norm": f"{_MTP}final_layernorm",
}
_IN_LAYER = {
    "output": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
_MTP_SETTINGS = {"normed_states": True, "feeds_normed": True, "states_first": False, "experts": None, "latent": None}
"""What the layout means of `mtp`, for which it has no fields."""


def write_speculators(trained: TrainedHead, model: Reader, out: Path) -> None:
    """Write a head to a folder that vLLM's `speculators` and `TrainedHead.load` read.

    Integer layers are written in floating point. A reduced vocabulary brings its rows of the model's projection; `mtp`
    has none in this layout, and drafts all tokens of the model.

    Args:
        trained: The head.
        model: The model it drafts for, which the folder names as its verifier.
        out: A new folder.

    Raises:
        SettingsError: For a kind of head that the layout does not have, for another model, for a folder with files.
        UnsupportedModel: For a head with a part that the layout does not have, by its name.
    """
    if trained.kind not in _ALGORITHMS:
        raise SettingsError(
            f"speculators has no layout for a head for {trained.kind}: it has those for {', '.join(_ALGORITHMS)}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"{out} exists: name a new folder")
    head = head_kind(trained.kind)(trained, model)
    shapes = [LayerShape(**shape) for shape in (trained.settings["layer"], *trained.settings.get("further", ()))]
    tensors = _tensors(head, shapes)
    config = _config(head, shapes, tensors)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / CONFIG, json.dumps(config, indent=1) + "\n")
    with replacing(out / _WEIGHTS) as temporary:
        save_file({name: each.contiguous().clone() for name, each in tensors.items()}, temporary)


def _tensors(head: BoundHead, shapes: list[LayerShape]) -> dict[str, torch.Tensor]:
    """The tensors of a head by their names in the layout.

    Raises:
        UnsupportedModel: For one that the layout does not have.
    """
    of_mtp, left, found = head.kind == "mtp", Parts(head.trained.tensors).floating(), dict[str, torch.Tensor]()
    ids, names = left.pop("vocabulary", None), _NAMES | (_OF_MTP if of_mtp else {})
    if ids is not None and not of_mtp:
        ids = ids.long()
        if "lm_head.weight" not in left:
            left["lm_head.weight"] = floating(head.model.projection(ids.to(head.model.device))).weight.cpu()
        found["d2t"] = ids - torch.arange(len(ids), device="cpu")
        found["t2d"] = torch.zeros(head.model.vocab_size, dtype=torch.bool, device="cpu").index_fill(0, ids, True)
    for name, each in left.items():
        stem, _, part = name.rpartition(".")
        layer, _, inner = stem.partition(".")
        if _LAYER.fullmatch(layer):
            number = int(layer.partition("_")[2] or 0)
            prefix, rows = _MTP if of_mtp else f"layers.{number}.", _in_layer(inner, each, shapes[number])
            found |= {f"{prefix}{theirs}.{part}": own for theirs, own in rows.items()}
        elif stem == "mask_states":
            found["mask_hidden"] = each.view(1, 1, -1)
        elif stem in names:
            found[f"{names[stem]}.{part}"] = each
        else:
            raise UnsupportedModel(f"the layout of speculators has no place for {name} of a head for {head.kind}")
    return found


def _in_layer(name: str, rows: torch.Tensor, shape: LayerShape) -> dict[str, torch.Tensor]:
    """What a part of a decoder layer is in the layout, by its names there."""
    if name == "qkv":
        sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        return {f"self_attn.{each}_proj": own for each, own in zip("qkv", rows.split(sizes), strict=True)}
    if name == "gate_up":
        return {f"mlp.{each}_proj": own for each, own in zip(("gate", "up"), rows.chunk(2), strict=True)}
    if name not in _IN_LAYER:
        raise UnsupportedModel(f"the layout of speculators has no place for {name} of a layer")
    return {_IN_LAYER[name]: rows}


def _config(head: BoundHead, shapes: list[LayerShape], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The configuration of a head.

    Raises:
        UnsupportedModel: For a setting that the layout does not have.
    """
    settings, kind = head.trained.settings, head.kind
    meant: dict[str, Any] = _MTP_SETTINGS if kind == "mtp" else {}
    if kind == "dspark":
        meant = {"primed": settings["markov"] == "rnn" and not settings["from_anchor"]}
    for name, value in meant.items():
        if settings.get(name) != value:
            raise UnsupportedModel(f"the layout of speculators has no {name} = {settings[name]} of a head for {kind}")
    method = {"proposal_type": "greedy", "speculative_tokens": settings.get("heads", head.taught)}
    verifier = {"name_or_path": origin_of(head.model), "architectures": []}
    found: dict[str, Any] = {
        SPECULATORS: _ALGORITHMS[kind],
        "speculators_config": {
            "algorithm": _ALGORITHMS[kind],
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "transformer_layer_config": _layers(head, shapes, tensors),
    }
    if kind == "mtp":
        return found | {"num_nextn_predict_layers": 1}
    words = head.model.vocab_size if "d2t" not in tensors else len(tensors["d2t"])
    found |= {"draft_vocab_size": words, "target_hidden_size": head.model.config.hidden_size}
    if "mask_token" in settings:
        found["mask_token_id"] = settings["mask_token"]
    if kind in ("eagle-3", "p-eagle"):
        flags = {name: bool(settings.get(name)) for name in ("norm_before_residual", "norm_output")}
        flags |= {"norm_before_fc": "input_norm.weight" in tensors, "fc_norm": "fc_norm.0.weight" in tensors}
        return found | flags | {"eagle_aux_hidden_state_layer_ids": _taps(head)}
    found |= {"aux_hidden_state_layer_ids": _taps(head), "block_size": settings["block"]}
    found["sample_from_anchor"] = settings["from_anchor"]
    if not all(any(name.endswith(f"self_attn.{each}_norm.weight") for name in tensors) for each in "qk"):
        raise UnsupportedModel(
            f"vLLM norms the queries and keys of heads for {kind}, and this head has no such norms: it would be misread"
        )
    if any(shape.sliding is not None for shape in shapes):
        # For vLLM it says of every layer whether rows see the whole block; where it is absent they do.
        found["sliding_window_non_causal"] = settings["bidirectional"]
    if settings.get("target_layers") is not None:
        found["num_target_layers"] = settings["target_layers"]
    if kind == "dspark":
        found |= {"markov_rank": 0, "markov_head_type": settings["markov"] or "vanilla"}
        found["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
        if settings["markov"] is not None:
            found["markov_rank"] = tensors["markov_head.markov_w1.weight"].shape[1]
        if found["enable_confidence_head"]:
            width = tensors["confidence_head.proj.weight"].shape[1]
            found["confidence_head_with_markov"] = width > shapes[0].hidden
    return found


def _taps(head: BoundHead) -> list[int]:
    """The layers that the states enter which a head reads."""
    layers = head.model.config.num_layers
    return [layers // 2 if tap == "half" else hook_point(tap, layers).layer for tap in head.taps]


def _layers(head: BoundHead, shapes: list[LayerShape], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The layers as a model's configuration describes them."""
    first, config = shapes[0], head.model.config
    plain = LayerShape(first.hidden, first.inner, first.heads, first.kv_heads, first.head_dim, first.theta, first.eps)
    if any(replace(shape, sliding=None, stretch=tuple(shape.stretch)) != plain for shape in shapes):
        raise UnsupportedModel(
            "a head whose layers differ, or whose positions are scaled, cannot be written in the layout of speculators"
        )
    biased = next((name for name in tensors if name.endswith("_proj.bias")), None)
    if biased is not None:
        # Layers of heads are Llama's or Qwen3's there, and those have none.
        raise UnsupportedModel(
            f"layers of speculators' heads have no biases, and this head has {biased}, which it began with as a copy "
            "of its model's layer: use it here, or train one for a model whose layers have none"
        )
    normed = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    found: dict[str, Any] = {
        "model_type": "qwen3" if normed else "llama",
        "hidden_size": first.hidden,
        "intermediate_size": first.inner,
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "num_hidden_layers": len(shapes),
        "vocab_size": head.model.vocab_size,
        "rms_norm_eps": first.eps,
        "rope_theta": first.theta,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    windows = {shape.sliding for shape in shapes} - {None}
    if len(windows) > 1 or (windows and not head.trained.settings.get("window_from_anchor", True)):
        raise UnsupportedModel("the layout of speculators has no such windows of a head's layers")
    if windows:
        kinds = ["full_attention" if shape.sliding is None else SLIDING for shape in shapes]
        found |= {"layer_types": kinds, "sliding_window": windows.pop(), "use_sliding_window": True}
    return found
