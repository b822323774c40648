"""Next-token layers in a model's own folder or file: their tensors, and what families do with them.

Names and order are those of the public code: Qwen's `mtp.*`, MiMo's `model.mtp_layers.*`, and the layers after the last
one of DeepSeek-V3 and those that follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import UnsupportedModel
from decodery.models.families.seeing import SEEING
from decodery.models.families.tensor_names import is_mtp
from decodery.models.loaders.fields import INDEX, Fields, Kind, Whole, read_json
from decodery.models.loaders.folder import Shards
from decodery.models.loaders.gguf_config import read_gguf_config
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.torch.rope import rope_frequencies
from decodery.models.trained.artifact import remembered

from .checkpoint import CONFIG, EMBEDDING, Tensors
from .copied import layer_shape
from .experts import expert_settings, folder_experts
from .head import TrainedHead
from .latents import latent_settings
from .parts import Parts
from .published_layers import FAMILIES, HYBRIDS, DraftLayers

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""What families call the number of their next-token layers."""
_KINDS: dict[str, Kind] = {name: Whole(0, 64) for name in (*COUNTS, "num_hidden_layers")}
_MIXED = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
"""Families whose next-token layer has experts, as most layers of their models have."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_BLOCK = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    **{f"attn_{each}_norm": f"self_attn.{each}_norm" for each in "qk"},
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
"""Tensors of a GGUF file's block, by what follows the layer's name in folders."""
_NEXT = ("eh_proj", "enorm", "hnorm", "shared_head_norm", "shared_head_head", "embed_tokens")
"""What follows `nextn.`: the layer that joins token and state, the norms, the tables."""
_IN_GGUF = {"qwen3_5_text": 0, "qwen3_5_moe_text": 0, "glm4_moe": 2}
"""Families whose next-token block is run from GGUF files, by the number of their layout."""
_NORMS = ("token_norm", "feature_norm", "norm")


@dataclass(frozen=True)
class MTPLayout:
    """How a family keeps its next-token layer.

    Attributes:
        sign: A tensor that only such a layer has.
        layer: How the names of the decoder layer begin.
        fc: The layer that joins a token and a state.
        norms: Of the token, of the state and of what leaves the layer.
        states_first: Whether the state stands before the token in what `fc` takes.
        feeds_normed: Whether what is fed back is normed.
        words, embedding: Tables of the layer's own, which may be missing; None where it has none.
    """

    sign: str
    layer: str
    fc: str
    norms: tuple[str, str, str]
    states_first: bool = False
    feeds_normed: bool = True
    words: str | None = None
    embedding: str | None = None


def _layouts(layers: int) -> tuple[MTPLayout, ...]:
    """The layouts that are known, of a model of so many layers."""
    mimo, after = "model.mtp_layers.0.", f"model.layers.{layers}."
    return (
        MTPLayout(
            "mtp.fc.weight",
            "mtp.layers.0.",
            "mtp.fc",
            ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        ),
        MTPLayout(
            f"{mimo}input_proj.weight",
            mimo,
            f"{mimo}input_proj",
            (f"{mimo}token_layernorm", f"{mimo}hidden_layernorm", f"{mimo}final_layernorm"),
            states_first=True,
        ),
        MTPLayout(
            f"{after}eh_proj.weight",
            after,
            f"{after}eh_proj",
            (f"{after}enorm", f"{after}hnorm", f"{after}shared_head.norm"),
            feeds_normed=False,
            words=f"{after}shared_head.head",
            embedding=f"{after}embed_tokens",
        ),
    )


def own_layout(folder: Path) -> MTPLayout | None:
    """How a model's folder keeps a next-token layer, None where it has none."""
    if not (folder / CONFIG).is_file() or not ((folder / INDEX).is_file() or (folder / "model.safetensors").is_file()):
        return None
    layers = Fields(_config(folder), str(folder / CONFIG), _KINDS).get("num_hidden_layers", 0)
    shards = Shards(folder)
    try:
        return next((each for each in _layouts(layers) if each.sign in shards.names), None)
    finally:
        shards.close()


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of a model's folder, of the language model where there are others beside it."""
    raw = read_json(folder / CONFIG)
    inner = raw.get("text_config")
    if raw.get("model_type") not in SEEING or not isinstance(inner, dict):
        return raw
    family, given = SEEING[raw["model_type"]]
    return given | {"model_type": family} | inner


@remembered
def own_mtp(folder: Path) -> TrainedHead:
    """The next-token layer of a model's folder, as the head of the drafter `mtp`.

    Raises:
        UnsupportedModel: For layers that are not run here, by what they have.
        CorruptFile: If something is missing.
    """
    layout = own_layout(folder)
    if layout is None:
        raise UnsupportedModel(f"{folder} has no next-token layer: name a model's folder that has one")
    raw, origin = _config(folder), str(folder / CONFIG)
    fields = Fields(raw, origin, _KINDS)
    for name in COUNTS:
        if fields.get(name, 1) > 1:
            raise fields.unsupported(name)
    known = {name: value for name, value in raw.items() if name not in COUNTS}
    layers = DraftLayers.of(known, origin, (*FAMILIES, *HYBRIDS, *_MIXED))
    shards, depth = Shards(folder), layers.config.num_layers
    try:
        wanted = [name for name in shards.names if is_mtp(name, depth)]
        tensors = Tensors(folder / CONFIG, {name: shards.tensor(name).clone() for name in wanted})
    finally:
        shards.close()
    found, about = next_layer(layers, layout, tensors)
    tensors.refuse_rest("mtp")
    return TrainedHead("mtp", found, about, {"layout": "mtp of the model"})


@remembered
def gguf_mtp(path: Path) -> TrainedHead | None:
    """The next-token layer of a GGUF file, as the head of `mtp`; None where the file has none.

    Raises:
        UnsupportedModel: For layers that are not run here, by what they have.
        CorruptFile: If something is missing.
    """
    file = GGUFFile.whole(path)
    try:
        config, origin = read_gguf_config(file, str(path)), str(path)
        depth = config.num_layers
        blocks, sign = f"blk.{depth}.", f"blk.{depth}.nextn.eh_proj.weight"
        if sign not in file.tensors:
            return None
        if config.family not in _IN_GGUF or f"blk.{depth + 1}.nextn.eh_proj.weight" in file.tensors:
            raise UnsupportedModel(
                f"{origin}: mtp runs the one next-token layer of qwen35, qwen35moe and glm4moe files, not those of "
                f"{config.family}: use another drafter"
            )
        layout = _layouts(depth)[_IN_GGUF[config.family]]
        named = {f"{blocks}{theirs}": layout.layer + ours for theirs, ours in _BLOCK.items()}
        ours = layout.fc, *layout.norms, layout.words, layout.embedding
        named |= {f"{blocks}nextn.{theirs}": name for theirs, name in zip(_NEXT, ours, strict=True) if name is not None}
        wanted = [name for name in file.tensors if name.startswith(blocks)]
        read = {_renamed(name, named): torch.from_numpy(file.rows(name)).clone() for name in wanted}
        if config.experts:
            read = folder_experts(read, blocks, layout.layer, config)
        whole = file.kind_name(sign) in _FLOATS
    finally:
        file.close()
    shape = replace(layer_shape(config, depth - 1), factor=rope_frequencies(config.rope, config.rope.rotated)[1])
    tensors = Tensors(path, read)
    found, about = next_layer(DraftLayers(config, (shape,)), layout, tensors)
    tensors.refuse_rest("nextn")
    return TrainedHead("mtp", found if whole else Parts(found).quantized(), about, {"layout": "nextn of the model"})


def _renamed(name: str, named: dict[str, str]) -> str:
    """What folders call a tensor, or its own name where they have no such one."""
    path, _, kind = name.rpartition(".")
    return f"{named[path]}.{kind}" if path in named else name


def next_layer(
    layers: DraftLayers, layout: MTPLayout, tensors: Tensors
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and settings of a next-token layer.

    Args:
        layers: What is known of it as a layer of a model.
        layout: How the checkpoint names it.
        tensors: Of the checkpoint, from which what is used is taken.
    """
    hidden, vocab = layers.hidden, layers.config.vocab_size
    found = layers.take(tensors, layout.layer, "layer.")
    found |= tensors.linear("fc", {layout.fc: hidden}, 2 * hidden)
    named = zip(_NORMS, layout.norms, strict=True)
    found |= layers.norms({f"{name}.weight": tensors.take(f"{theirs}.weight", hidden) for name, theirs in named})
    if layout.words is not None and f"{layout.words}.weight" in tensors:
        found |= tensors.linear("lm_head", {layout.words: vocab}, hidden)
    if layout.embedding is not None and f"{layout.embedding}.weight" in tensors:
        found[EMBEDDING] = tensors.take(f"{layout.embedding}.weight", vocab, hidden)
    about: dict[str, Any] = {
        "normed_states": True,
        "feeds_normed": layout.feeds_normed,
        "states_first": layout.states_first,
    }
    if layers.config.experts:
        about["experts"] = expert_settings(layers.config)
    if layers.config.latent is not None:
        about["latent"] = latent_settings(layers.config)
    return found, {**about, "layer": layers.settings()["layer"], "tokens": vocab}
