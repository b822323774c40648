"""DFlash and DSpark heads in GGUF files, in llama.cpp's layout (architecture `dflash`).

Layers of Qwen3 as folders have them; `target_layers` names the layers that the target's states enter, where folders
have those that they leave. A file with the tables of a Markov head is DSpark's, whose rows predict from the block's
first token unless the file says otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile
from decodery.models.config import LAYERS, POSITIONS, TOKEN_ID
from decodery.models.loaders.fields import Array, Fields, Flag, Kind, Whole
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.torch.rope import rope_frequencies

from .checkpoint import Tensors
from .copied import layer_shape
from .gguf_parts import KINDS, coded, described, entered, head_config, head_tensors
from .head import TrainedHead
from .parts import Parts
from .published_blocks import dflash, dspark
from .published_fields import SETTINGS
from .published_layers import DraftLayers

_WINDOW, _PATTERN, _SECTIONS = "attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_sections"
_MASK = "tokenizer.ggml.mask_token_id"
_KINDS: dict[str, Kind] = {
    **KINDS,
    "block_size": Whole(1, 1 << 10),
    "sample_from_anchor": Flag(),
    _WINDOW: Whole(0, POSITIONS.most),
    _PATTERN: Array(LAYERS.most),
    _SECTIONS: Array(LAYERS.most),
}
_OTHERS = {
    "enc.output_norm": "hidden_norm",
    **{name: f"markov_head.{name}" for name in ("markov_w1", "markov_w2")},
    "conf_proj": "confidence_head.proj",
}
_NORMS = {f"attn_{each}_norm": f"self_attn.{each}_norm" for each in "qk"}


def gguf_dflash(file: GGUFFile, path: Path) -> TrainedHead:
    """The DFlash or DSpark head of a GGUF file.

    Raises:
        UnsupportedModel: For what is not run here, by its name.
        CorruptFile: If something is missing.
    """
    origin = str(path)
    fields = described(file, "dflash", origin, _KINDS)
    config = head_config(file, fields, normed=True)
    sections = fields.get(_SECTIONS)
    if sections is not None and any(sections[1:]):
        raise fields.unsupported(_SECTIONS)
    places = {number: f"layers.{number}." for number in range(config.num_layers)}
    read = head_tensors(file, places, _NORMS, _OTHERS)
    if (name := "confidence_head.proj.weight") in read:
        # A matrix of one row may be written as a vector.
        read[name] = read[name].view(1, -1)
    shape = replace(layer_shape(config, 0), factor=rope_frequencies(config.rope, config.head_dim)[1])
    layers = DraftLayers(config, tuple(replace(shape, sliding=each) for each in _windows(fields, config.num_layers)))
    markov = read.get("markov_head.markov_w1.weight")
    about: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": entered(fields),
        "draft_vocab_size": len(read["d2t"]) if "d2t" in read else config.vocab_size,
        "block_size": fields.need("block_size"),
        "mask_token_id": Fields(file.metadata, origin, {_MASK: TOKEN_ID}).need(_MASK),
        "sample_from_anchor": fields.get("sample_from_anchor", markov is not None),
        "markov_rank": 0 if markov is None else markov.shape[-1],
        "enable_confidence_head": name in read,
        "confidence_head_with_markov": True,
    }
    settings, tensors = Fields(about, origin, SETTINGS), Tensors(path, read)
    found, made = (dflash if markov is None else dspark)(settings, layers, tensors)
    tensors.refuse_rest("dflash of llama.cpp")
    if coded(file):
        found = Parts(found).quantized()
    # They draft with the target's own projection.
    made |= {"tokens": config.vocab_size}
    kind = "dflash" if markov is None else "dspark"
    return TrainedHead(kind, found, layers.settings() | made, {"layout": "dflash of llama.cpp"})


def _windows(fields: Fields, layers: int) -> list[int | None]:
    """Of every layer how many positions it sees, None for all."""
    window = fields.get(_WINDOW, 0)
    if not window:
        return [None] * layers
    pattern = fields.need(_PATTERN)
    if len(pattern) != layers:
        raise CorruptFile(f"{fields.origin}: {_PATTERN} should have {layers} values")
    return [window if slides else None for slides in pattern]
