"""EAGLE-3 heads in GGUF files, in llama.cpp's layout (architecture `eagle3`).

One block whose attention reads the normed embedding beside the normed states; queries and keys are stored with rotated
neighbours side by side. `target_layers`, which was `extract_layers` once, names the layers that the target's states
enter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decodery.models.config import LAYERS, WIDTH
from decodery.models.loaders.fields import Array, Fields, Flag, Kind
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.torch.rope import rope_frequencies

from .checkpoint import Tensors
from .copied import layer_shape
from .gguf_parts import KINDS, coded, described, entered, head_config, head_tensors
from .head import TrainedHead
from .parts import Parts
from .published import eagle_3
from .published_fields import SETTINGS
from .published_layers import DraftLayers

_SWITCHES = ("norm_before_residual", "norm_before_fc")
_OLDER = "extract_layers"
_KINDS: dict[str, Kind] = {
    **KINDS,
    _OLDER: Array(LAYERS.most),
    "target_hidden_size": WIDTH,
    **dict.fromkeys(_SWITCHES, Flag()),
}
_LAYER = "midlayer."


def gguf_eagle_3(file: GGUFFile, path: Path) -> TrainedHead:
    """The EAGLE-3 head of a GGUF file.

    Raises:
        UnsupportedModel: For what is not run here, by its name.
        CorruptFile: If something is missing.
    """
    origin = str(path)
    fields = described(file, "eagle3", origin, _KINDS)
    config = head_config(file, fields)
    if config.num_layers != 1:
        raise fields.unsupported("block_count")
    read = head_tensors(file, {0: _LAYER}, {"attn_norm_2": "hidden_norm"}, {"enc.output_norm": "input_norm"})
    for each, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        name = f"{_LAYER}self_attn.{each}_proj.weight"
        if name in read and read[name].shape[0] == heads * config.head_dim:
            read[name] = _apart(read[name], heads)
    outputs = len(read["d2t"]) if "d2t" in read else config.vocab_size
    about: dict[str, Any] = {"draft_vocab_size": outputs, "target_hidden_size": fields.need("target_hidden_size")}
    about["eagle_aux_hidden_state_layer_ids"] = entered(fields, _OLDER)
    about |= {name: fields.get(name, False) for name in _SWITCHES}
    shape = replace(layer_shape(config, 0), factor=rope_frequencies(config.rope, config.head_dim)[1])
    layers, tensors = DraftLayers(config, (shape,)), Tensors(path, read)
    found, settings = eagle_3(Fields(about, origin, SETTINGS), layers, tensors)
    tensors.refuse_rest("eagle3 of llama.cpp")
    if coded(file):
        found = Parts(found).quantized()
    return TrainedHead("eagle-3", found, layers.settings() | settings, {"layout": "eagle3 of llama.cpp"})


def _apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys [n, width] with rotated neighbours half a head apart, as this package has them."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
