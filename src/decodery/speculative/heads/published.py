"""Heads that others have published: which kind a folder holds, and its tensors and settings as this package names them.

Names and shapes are those of the public code (SafeAILab/EAGLE, vllm-project/speculators, sgl-project/SpecForge,
deepseek-ai/DeepSpec and z-lab/dflash; for Medusa and Hydra see `published_mlp`); whatever could not be run faithfully
is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.config import LAYERS
from decodery.models.loaders.config_keys import refuse_unknown
from decodery.models.loaders.fields import INDEX, Fields, read_json, shard_names, shown
from decodery.models.trained.artifact import remembered

from . import published_mlp
from .checkpoint import CONFIG, Tensors, refuse_pickle, weights_of
from .head import TrainedHead
from .own_mtp import MTPLayout, next_layer, own_layout, own_mtp
from .published_blocks import dflash, dspark
from .published_fields import (
    HEAD_FIELDS,
    SETTINGS,
    SPECULATORS,
    SPECULATORS_KINDS,
    UNREAD,
    draft_taps,
    flat,
    mask_token,
    refuse_others,
    steps,
    verifier,
)
from .published_layers import FAMILIES, HYBRIDS, SLIDING, DraftLayers, slides

_MLPS = {
    "medusa": ("medusa", published_mlp.medusa),
    "medusa of vLLM": ("medusa", published_mlp.vllm_medusa),
    "hydra": ("hydra", published_mlp.hydra),
}
_OF_MLPS = (
    *published_mlp.SETTINGS,
    *("base_model_name_or_path", "version", "max_paths", "topk", "max_seq_len", "lm_head_init_method", "dropout_rate"),
)
_Found = tuple[dict[str, torch.Tensor], dict[str, Any]]


def published(folder: Path) -> TrainedHead:
    """The head of a folder with a `config.json`, or the next-token layer of a model's folder.

    Raises:
        UnsupportedModel: For a layout that is not known, by its name.
        CorruptFile: If something is missing.
        ModelNotFound: If there are no safetensors.
    """
    if own_layout(folder) is not None:
        return own_mtp(folder)
    weights = weights_of(folder)
    if weights is None:
        named = _named(_settings(folder))
        raise refuse_pickle(folder, f"{named}_lm_head.safetensors" if named else "model.safetensors")
    if weights.name == INDEX:
        # Names alone tell a head from a whole model, whose files are many.
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        _layout(_settings(folder), Tensors(weights, dict.fromkeys(shard_names(folder), empty)))
    return _read(folder)


@remembered
def _read(folder: Path) -> TrainedHead:
    weights = weights_of(folder)
    assert weights is not None
    settings, tensors = _settings(folder), Tensors(weights)
    layout = _layout(settings, tensors)
    facts: dict[str, Any] = {"layout": layout}
    if layout in _MLPS:
        refuse_unknown(settings.raw, settings.origin, _OF_MLPS)
        kind, read = _MLPS[layout]
        found, about = read(Fields(settings.raw, settings.origin, published_mlp.SETTINGS), tensors)
    else:
        algorithm = layout.removeprefix(_OWN)
        layers = _layers(settings, algorithm, of_its_own=layout.startswith(_OWN))
        kind, read_layers = _READERS[algorithm]
        found, about = read_layers(settings, layers, tensors)
        about = layers.settings() | about
        if algorithm in ("dflash", "dspark", "mtp"):
            # They draft with the target's own projection.
            about["tokens"] = layers.config.vocab_size
        facts |= {"verifier": verifier(settings)}
    tensors.refuse_rest(layout)
    return TrainedHead(kind, found, about, facts)


_OWN = "speculators "
_BLOCKS = ("dflash", "dspark")
_OF_BLOCKS = {"causal": True, "is_causal": True, "use_swa": False, "swa_window_size": None}
"""What is said of the rows of blocks, by what is true of other heads."""
_DSPARK, _LLAMA = "Qwen3DSparkModel", {"LlamaForCausalLMEagle3", "PEagleDraftModel"}
"""Architectures: DeepSpec's of blocks, and SpecForge's whose layers are Llama's whatever the file calls its model."""
_NEXT = MTPLayout(
    "mtp_layers.0.input_proj.weight",
    "mtp_layers.0.",
    "mtp_layers.0.input_proj",
    ("mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm", "mtp_layers.0.final_layernorm"),
    words="lm_head",
    embedding="embed_tokens",
)


def _settings(folder: Path) -> Fields:
    return flat(read_json(folder / CONFIG), str(folder / CONFIG))


def _named(settings: Fields) -> str | None:
    """Of which kind of MLPs a configuration is, if of any."""
    if "hydra_num_heads" in settings.raw:
        return "hydra"
    return "medusa" if "medusa_num_heads" in settings.raw or settings.get("model_type") == "medusa" else None


def _layout(settings: Fields, tensors: Tensors) -> str:
    """The name of a checkpoint's layout."""
    kind, named = settings.get(SPECULATORS), _named(settings)
    if kind in SPECULATORS_KINDS:
        return f"{_OWN}{kind}"
    if named == "hydra":
        return "hydra"
    if named == "medusa" and "0.0.linear.weight" in tensors:
        return "medusa"
    if named == "medusa" and "blocks.0.layers.0.weight" in tensors:
        return "medusa of vLLM"
    architectures = settings.get("architectures", [])
    if kind is None and ("dflash_config" in settings.raw or _DSPARK in architectures):
        usual = "dspark" if any("DSpark" in each for each in architectures) else "dflash"
        projector: str = settings.get("projector_type", usual)
        return projector if projector in _BLOCKS else _strange(settings, tensors)
    if kind is None and "mask_hidden" in tensors:
        return "peagle"
    if kind is None and "midlayer.self_attn.q_proj.weight" in tensors:
        return "eagle3"
    if kind is None and "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        # Some write EAGLE-3's layer under the name of EAGLE's; it has a norm of its own for the states.
        return "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    return _strange(settings, tensors)


def _strange(settings: Fields, tensors: Tensors) -> str:
    """Raise UnsupportedModel for a layout that is not known."""
    unknown = settings.get(SPECULATORS) or settings.raw.get("architectures") or settings.raw.get("model_type")
    raise UnsupportedModel(
        f"{settings.origin}: {unknown or tensors.first} is no layout of a draft head that is known here, which are "
        "EAGLE's, EAGLE-3's, P-EAGLE's, DFlash's, DSpark's, Medusa's (also vLLM's) and Hydra's, and "
        f"{', '.join(SPECULATORS_KINDS)} of speculators"
    )


def _layers(settings: Fields, algorithm: str, *, of_its_own: bool) -> DraftLayers:
    """The layers, which are described as those of a model.

    Args:
        settings: What the head's configuration says.
        algorithm: What the head is.
        of_its_own: Whether they are described in a record beside what the head is.
    """
    raw, origin = settings.raw, settings.origin
    if of_its_own:
        refuse_unknown(raw, origin, (*SETTINGS, *UNREAD, "tie_word_embeddings"))
        raw = settings.get("transformer_layer_config") or {}
        refuse_others(Fields(raw, origin, SETTINGS))
    for each in (settings.raw, raw):
        if each.get("quantization_config"):
            raise UnsupportedModel(
                f"{origin}: by its quantization_config the head is quantized, and heads are read in floating point: "
                "give the one that it was made of"
            )
        if each.get("layernorms"):
            raise Fields(each, origin, SETTINGS).unsupported("layernorms")
    if settings.get("parallel_drafting") and algorithm != "peagle":
        raise settings.unsupported("parallel_drafting")
    for name, plain in _OF_BLOCKS.items():
        if algorithm not in _BLOCKS and settings.get(name, plain) != plain:
            raise settings.unsupported(name)
    if of_its_own:
        return DraftLayers.of(raw, origin, (*FAMILIES, *HYBRIDS) if algorithm == "mtp" else FAMILIES)
    own: dict[str, Any] = {"model_type": "llama"} if _LLAMA & {*settings.get("architectures", ())} else {}
    if settings.get("use_swa") and not slides(raw):
        own["layer_types"] = [SLIDING] * Fields(raw, origin, {"num_hidden_layers": LAYERS}).need("num_hidden_layers")
    if (window := settings.get("swa_window_size")) is not None:
        if raw.get("sliding_window") not in (None, window):
            raise CorruptFile(
                f"{origin}: sliding_window is {shown(raw['sliding_window'])}, and swa_window_size is {window}"
            )
        own |= {"sliding_window": window, "use_sliding_window": True}
    kept = {name: value for name, value in raw.items() if name not in HEAD_FIELDS}
    return DraftLayers.of(kept | own, origin)


def _eagle(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    speculators = settings.get(SPECULATORS) is not None
    prefix, fc = ("transformer.", "fusion_fc") if speculators else ("layers.0.", "fc")
    _one_layer(settings, layers)
    hidden = layers.hidden
    found = layers.take(tensors, prefix, "layer.", hidden) | tensors.linear("fc", {fc: hidden}, 2 * hidden)
    return found | layers.words(tensors, layers.config.vocab_size), {}


def _one_layer(settings: Fields, layers: DraftLayers) -> None:
    if len(layers.shapes) != 1:
        raise UnsupportedModel(
            f"{settings.origin}: num_hidden_layers = {len(layers.shapes)}, and heads of this layout have one layer here"
        )


def eagle_3(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    """Tensors and settings of an EAGLE-3 head.

    Args:
        settings: What the head's configuration says beside its layers.
        layers: Its layers.
        tensors: Its checkpoint, from which what is used is taken.
    """
    first = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
    hidden, vocab = layers.hidden, layers.config.vocab_size
    outputs, width = settings.get("draft_vocab_size", vocab), settings.get("target_hidden_size", hidden)
    taps = draft_taps(settings)
    found = layers.take(tensors, first, "layer.", 2 * hidden)
    for number in range(1, len(layers.shapes)):
        found |= layers.take(tensors, f"layers.{number}.", f"layer_{number}.")
    alone = (outputs, width) != (vocab, hidden)
    found |= layers.words(tensors, outputs, needed=alone, tied=layers.config.tie_embeddings)
    found |= tensors.linear("fc", {"fc": hidden}, len(taps) * width)
    if settings.get("norm_before_fc") and settings.get("fc_norm"):
        raise CorruptFile(f"{settings.origin}: norm_before_fc and fc_norm are both set, and a head has one of them")
    if settings.get("norm_before_fc"):
        found["states_norm.weight"] = tensors.take("input_norm.weight", len(taps) * width)
    for number in range(len(taps) if settings.get("fc_norm") else 0):
        found[f"states_norm.{number}.weight"] = tensors.take(f"fc_norm.{number}.weight", width)
    for name, theirs in (("token_norm", "input_layernorm"), ("feature_norm", "hidden_norm")):
        found[f"{name}.weight"] = tensors.take(f"{first}{theirs}.weight", hidden)
    found["norm.weight"] = tensors.take("norm.weight", hidden)
    switches = {name: settings.get(name, False) for name in ("norm_before_residual", "norm_output")}
    # Without a projection of its own a head speaks by the target's.
    shared = {} if "lm_head.weight" in found else {"tokens": vocab}
    return found, {"taps": taps, **switches, **shared}


def _p_eagle(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    found, about = eagle_3(settings, layers, tensors)
    width = found["fc.weight"].shape[1]
    found["mask_states.weight"] = tensors.vector("mask_hidden", width)
    return found, about | {"mask_token": mask_token(settings, layers.config.vocab_size), "heads": steps(settings, 8)}


def _mtp(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    if settings.get("num_nextn_predict_layers", 1) != 1:
        raise settings.unsupported("num_nextn_predict_layers")
    # The configuration is that of the whole model; the layer is one like its layers.
    found, about = next_layer(layers, _NEXT, tensors)
    return found, about | {"further": []}


_READERS = {
    "eagle": ("eagle", _eagle),
    "eagle3": ("eagle-3", eagle_3),
    "peagle": ("p-eagle", _p_eagle),
    "dflash": ("dflash", dflash),
    "dspark": ("dspark", dspark),
    "mtp": ("mtp", _mtp),
}
"""By algorithm: the drafter that runs such a head, and what reads its tensors."""
