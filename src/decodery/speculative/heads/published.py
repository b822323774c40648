"""Heads that others have published: which kind a folder holds, and its tensors and settings as this package names them.

Names and shapes are those of the public code (SafeAILab/EAGLE, vllm-project/speculators, sgl-project/SpecForge and
z-lab/dflash; for Medusa and Hydra see `published_mlp`); whatever could not be run faithfully is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.loaders.config_keys import refuse_unknown
from decodery.models.loaders.fields import Fields, read_json
from decodery.models.trained.artifact import remembered

from . import published_mlp
from .checkpoint import CONFIG, Tensors, refuse_pickle, weights_of
from .head import TrainedHead
from .own_mtp import own_layout, own_mtp
from .published_fields import HEAD_FIELDS, SETTINGS, SPECULATORS, SPECULATORS_KINDS, UNREAD, draft_taps, steps, verifier
from .published_layers import FAMILIES, DraftLayers

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
        layers = _layers(settings, of_its_own=layout.startswith(_OWN))
        algorithm = layout.removeprefix(_OWN)
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


def _settings(folder: Path) -> Fields:
    return Fields(read_json(folder / CONFIG), str(folder / CONFIG), SETTINGS)


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
    if kind is None and "dflash_config" in settings.raw:
        return {"dspark": "dspark", "dflash": "dflash"}.get(_projector(settings)) or _strange(settings, tensors)
    if kind is None and "mask_hidden" in tensors:
        return "peagle"
    if kind is None and "midlayer.self_attn.q_proj.weight" in tensors:
        return "eagle3"
    if kind is None and "fc.weight" in tensors and "layers.0.self_attn.q_proj.weight" in tensors:
        # Some write EAGLE-3's layer under the name of EAGLE's; it has a norm of its own for the states.
        return "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    return _strange(settings, tensors)


def _projector(settings: Fields) -> str:
    found = (settings.get("dflash_config") or {}).get("projector_type")
    return str(found or "dflash")


def _strange(settings: Fields, tensors: Tensors) -> str:
    """Raise UnsupportedModel for a layout that is not known."""
    unknown = settings.get(SPECULATORS) or settings.raw.get("architectures") or settings.raw.get("model_type")
    raise UnsupportedModel(
        f"{settings.origin}: {unknown or tensors.first} is no layout of a draft head that is known here, which are "
        "EAGLE's, EAGLE-3's, P-EAGLE's, DFlash's, DSpark's, Medusa's (also vLLM's) and Hydra's, and "
        f"{', '.join(SPECULATORS_KINDS)} of speculators"
    )


def _layers(settings: Fields, *, of_its_own: bool) -> DraftLayers:
    """The layers, which are described as those of a model. of_its_own: in a record beside what the head is."""
    raw, origin = settings.raw, settings.origin
    if of_its_own:
        refuse_unknown(raw, origin, (*SETTINGS, *UNREAD, "tie_word_embeddings"))
        raw = settings.get("transformer_layer_config") or {}
    own = Fields(raw, origin, SETTINGS)
    if settings.get("layernorms") or own.get("layernorms"):
        raise (settings if settings.get("layernorms") else own).unsupported("layernorms")
    return DraftLayers.of({name: value for name, value in raw.items() if name not in HEAD_FIELDS}, origin, FAMILIES)


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
    if not (settings.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise settings.unsupported("eagle_config")
    first = "midlayer." if "midlayer.self_attn.q_proj.weight" in tensors else "layers.0."
    hidden = layers.hidden
    outputs, width = settings.get("draft_vocab_size", layers.config.vocab_size), settings.get("target_hidden_size")
    taps, width = draft_taps(settings), width or hidden
    found = layers.take(tensors, first, "layer.", 2 * hidden)
    for number in range(1, len(layers.shapes)):
        found |= layers.take(tensors, f"layers.{number}.", f"layer_{number}.")
    found |= layers.words(tensors, outputs, needed=True)
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
    return found, {"taps": taps, **switches}


def _p_eagle(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    found, about = eagle_3(settings, layers, tensors)
    width = found["fc.weight"].shape[1]
    found["mask_states.weight"] = tensors.take("mask_hidden", 1, 1, width)[0, 0]
    return found, about | {"mask_token": _mask(settings, layers), "heads": steps(settings, 8)}


def _mask(settings: Fields, layers: DraftLayers) -> int:
    """The token that stands for one that is not known yet."""
    own: int | None = (settings.get("dflash_config") or {}).get("mask_token_id")
    found = settings.get("mask_token_id") if own is None else own
    if found is None:
        raise CorruptFile(f"{settings.origin} has no field mask_token_id: the file is incomplete")
    if not 0 <= found < layers.config.vocab_size:
        raise CorruptFile(
            f"{settings.origin}: mask_token_id = {found}, and tokens are 0 to {layers.config.vocab_size - 1}"
        )
    return int(found)


def _dflash(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    hidden, speculators = layers.hidden, settings.get(SPECULATORS) is not None
    own = settings.get("dflash_config") or {}
    taps, width = draft_taps(settings, len(layers.shapes)), settings.get("target_hidden_size") or hidden
    found: dict[str, torch.Tensor] = {}
    for number in range(len(layers.shapes)):
        found |= layers.take(tensors, f"layers.{number}.", f"layer_{number}.")
    found |= tensors.linear("fc", {"fc": hidden}, len(taps) * width)
    for name in ("hidden_norm", "norm"):
        found[f"{name}.weight"] = tensors.take(f"{name}.weight", hidden)
    outputs = settings.get("draft_vocab_size", layers.config.vocab_size)
    found |= layers.words(tensors, outputs, needed=outputs != layers.config.vocab_size)
    size = settings.get("block_size") or own.get("block_size")
    if size is None:
        raise CorruptFile(f"{settings.origin} has no field block_size: the file is incomplete")
    anchored = settings.get("sample_from_anchor", settings.get(SPECULATORS) == "dspark")
    if size < 2 - anchored:
        raise CorruptFile(f"{settings.origin}: block_size = {size} leaves no token to draft")
    about = {
        "taps": taps,
        "mask_token": _mask(settings, layers),
        "block": size,
        "heads": size if anchored else size - 1,
        "from_anchor": bool(anchored),
        # A window is counted from the block's first token in one project's training and from every row in the other's.
        "window_from_anchor": speculators,
        "bidirectional": bool(settings.get("sliding_window_non_causal", False)),
        "target_layers": settings.get("num_target_layers"),
    }
    return found, about


def _dspark(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    found, about = _dflash(settings, layers, tensors)
    speculators = settings.get(SPECULATORS) is not None
    own = settings if speculators else Fields(settings.get("dflash_config"), settings.origin, SETTINGS)
    hidden, rank = layers.hidden, own.get("markov_rank", 256 if speculators else 0)
    variant = str(own.get("markov_head_type", "vanilla")).lower()
    if variant not in ("vanilla", "gated", "rnn"):
        raise own.unsupported("markov_head_type")
    if rank:
        markov = "markov_head."
        outputs = settings.get("draft_vocab_size", layers.config.vocab_size)
        found["markov_in.weight"] = tensors.take(f"{markov}markov_w1.weight", layers.config.vocab_size, rank)
        found |= tensors.linear("markov_out", {f"{markov}markov_w2": outputs}, rank)
        if variant == "gated":
            found |= tensors.linear("markov_gate", {f"{markov}gate_proj": rank}, hidden + rank)
        elif variant == "rnn":
            found |= tensors.linear("markov_step", {f"{markov}joint_proj": 3 * rank}, hidden + 2 * rank)
    if own.get("enable_confidence_head", speculators or bool(own.get("confidence_head_alpha"))):
        after = rank if own.get("confidence_head_with_markov", speculators) else 0
        found |= tensors.linear("confidence", {"confidence_head.proj": 1}, hidden + after)
    # Of a recurrent Markov head one project runs the row of the block's first token, too.
    primed = variant == "rnn" and speculators and not about["from_anchor"]
    return found, about | {"markov": variant if rank else None, "primed": primed}


def _mtp(settings: Fields, layers: DraftLayers, tensors: Tensors) -> _Found:
    if settings.get("num_nextn_predict_layers", 1) != 1:
        raise settings.unsupported("num_nextn_predict_layers")
    prefix, hidden = "mtp_layers.0.", layers.hidden
    # The configuration is that of the whole model; the layer is one like its layers.
    found = layers.take(tensors, prefix, "layer.")
    names = {"token_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "norm": "final_layernorm"}
    for name, theirs in names.items():
        found[f"{name}.weight"] = tensors.take(f"{prefix}{theirs}.weight", hidden)
    found |= tensors.linear("fc", {f"{prefix}input_proj": hidden}, 2 * hidden)
    found |= layers.words(tensors, layers.config.vocab_size)
    return found, {"further": [], "normed_states": True, "feeds_normed": True, "states_first": False}


_READERS = {
    "eagle": ("eagle", _eagle),
    "eagle3": ("eagle-3", eagle_3),
    "peagle": ("p-eagle", _p_eagle),
    "dflash": ("dflash", _dflash),
    "dspark": ("dspark", _dspark),
    "mtp": ("mtp", _mtp),
}
"""By algorithm: the drafter that runs such a head, and what reads its tensors."""
