"""EAGLE-3 heads in GGUF files, in llama.cpp's layout (architecture `eagle3`).

One block whose attention reads the normed embedding beside the normed states; queries and keys are stored with rotated
neighbours side by side. `extract_layers` names the layers that the target's states enter, and `d2t` holds token ids,
where folders have offsets.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.config import LAYERS, TOKENS, WIDTH, ModelConfig
from decodery.models.loaders.config_check import check_config
from decodery.models.loaders.fields import Array, Fields, Flag, Kind, Whole
from decodery.models.loaders.gguf_config import SIZES, refuse_other_widths
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.loaders.gguf_rope import FREQUENCIES, read_rope
from decodery.models.torch.rope import rope_frequencies
from decodery.models.trained.artifact import remembered

from .checkpoint import EMBEDDING, Tensors
from .copied import layer_shape
from .head import TrainedHead
from .parts import Parts
from .published import eagle_3
from .published_fields import SETTINGS
from .published_layers import DraftLayers

ARCHITECTURE = "eagle3"
_KINDS: dict[str, Kind] = {
    **SIZES,
    "vocab_size": TOKENS,
    "extract_layers": Array(LAYERS.most),
    "target_hidden_size": WIDTH,
    "norm_before_residual": Flag(),
    "rope.scaling.finetuned": Flag(),
    "rope.scaling.yarn_log_multiplier": Whole(0, 0),
}
_LAYER = "midlayer."
_NAMES = {
    **{f"blk.0.attn_{each}": f"{_LAYER}self_attn.{each}_proj" for each in "qkv"},
    **{f"blk.0.ffn_{each}": f"{_LAYER}mlp.{each}_proj" for each in ("gate", "up", "down")},
    "blk.0.attn_output": f"{_LAYER}self_attn.o_proj",
    "blk.0.attn_norm": f"{_LAYER}input_layernorm",
    "blk.0.attn_norm_2": f"{_LAYER}hidden_norm",
    "blk.0.ffn_norm": f"{_LAYER}post_attention_layernorm",
    "output": "lm_head",
    "output_norm": "norm",
    "token_embd": EMBEDDING.removesuffix(".weight"),
    "fc": "fc",
}
"""Tensors of a file, by what folders call them."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_TOKENS = "tokenizer.ggml.tokens"


@remembered
def gguf_eagle_3(path: Path) -> TrainedHead:
    """The EAGLE-3 head of a GGUF file.

    Raises:
        UnsupportedModel: For a file of another architecture, and for what is not run here, by its name.
        CorruptFile: If something is missing.
    """
    file = GGUFFile.whole(path)
    try:
        return _read(file, path)
    finally:
        file.close()


def _read(file: GGUFFile, path: Path) -> TrainedHead:
    origin, architecture = str(path), file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModel(
            f"{origin}: a GGUF file of a draft head is of the architecture {ARCHITECTURE}, and this one is of "
            f"{architecture!r}: name a head, or use this file as a model"
        )
    prefix = f"{ARCHITECTURE}."
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = Fields(named, origin, _KINDS)
    for key in sorted(named.keys() - _KINDS.keys()):
        raise UnsupportedModel(
            f"{origin}: the key {prefix}{key} is not known here, so the head might not run as trained"
        )
    config = _config(file, fields)
    read = {
        f"{_NAMES.get(name.removesuffix('.weight'), name.removesuffix('.weight'))}.weight": torch.from_numpy(
            file.rows(name)
        ).clone()
        for name in file.tensors
        if name not in ("d2t", FREQUENCIES)
    }
    for each, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        name = f"{_LAYER}self_attn.{each}_proj.weight"
        if name in read and read[name].shape[0] == heads * config.head_dim:
            read[name] = _apart(read[name], heads)
    outputs = file.info("output.weight").shape[0]
    if "d2t" in file.tensors:
        read["d2t"] = torch.from_numpy(file.integers("d2t")) - torch.arange(outputs, dtype=torch.int64, device="cpu")
    about: dict[str, Any] = {"draft_vocab_size": outputs, "target_hidden_size": fields.need("target_hidden_size")}
    about["eagle_aux_hidden_state_layer_ids"] = [int(layer) for layer in fields.need("extract_layers")]
    about["norm_before_residual"] = fields.get("norm_before_residual", False)
    shape = replace(layer_shape(config, 0), factor=rope_frequencies(config.rope, config.head_dim)[1])
    layers, tensors = DraftLayers(config, (shape,)), Tensors(path, read)
    found, settings = eagle_3(Fields(about, origin, SETTINGS), layers, tensors)
    tensors.refuse_rest("eagle3 of llama.cpp")
    if file.kind_name("fc.weight") not in _FLOATS:
        found = Parts(found).quantized()
    return TrainedHead("eagle-3", found, layers.settings() | settings, {"layout": "eagle3 of llama.cpp"})


def _config(file: GGUFFile, fields: Fields) -> ModelConfig:
    """The sizes of the block, as those of a model."""
    if fields.need("block_count") != 1:
        raise fields.unsupported("block_count")
    hidden, heads = fields.need("embedding_length"), fields.need("attention.head_count")
    head_dim = fields.get("attention.key_length", max(hidden // heads, 1))
    refuse_other_widths(fields, head_dim)
    embedding, tokens = file.tensors.get("token_embd.weight"), len(file.metadata.get(_TOKENS, ()))
    vocab_size = fields.get("vocab_size", tokens) if embedding is None else embedding.shape[0]
    if not vocab_size:
        raise CorruptFile(f"{fields.origin} does not say how many tokens there are: the file is incomplete")
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.need("feed_forward_length"),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=fields.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=fields.need("context_length"),
        norm_eps=fields.need("attention.layer_norm_rms_epsilon"),
        rope=read_rope(file, fields, 10_000.0, head_dim),
    )
    check_config(config, fields.origin)
    return config


def _apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys [n, width] with rotated neighbours half a head apart, as this package has them."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
