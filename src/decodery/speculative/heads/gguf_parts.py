"""What draft heads in GGUF files of llama.cpp share: sizes of their blocks, tensors by the names that folders have."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.models.config import LAYERS, TOKENS, ModelConfig
from decodery.models.loaders.config_check import check_config
from decodery.models.loaders.fields import Array, Fields, Flag, Kind, Whole
from decodery.models.loaders.gguf_config import SIZES, refuse_other_widths
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.loaders.gguf_rope import FREQUENCIES, read_rope

from .checkpoint import EMBEDDING

KINDS: dict[str, Kind] = {
    **SIZES,
    "vocab_size": TOKENS,
    "target_layers": Array(LAYERS.most),
    "rope.scaling.finetuned": Flag(),
    "rope.scaling.yarn_log_multiplier": Whole(0, 0),
}
"""Keys that all heads have, after the name of their architecture."""
_BLOCK = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = {
    **{"output": "lm_head", "output_norm": "norm", "fc": "fc"},
    "token_embd": EMBEDDING.removesuffix(".weight"),
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_TOKENS = "tokenizer.ggml.tokens"


def described(file: GGUFFile, architecture: str, origin: str, kinds: Mapping[str, Kind]) -> Fields:
    """A file's metadata of an architecture, by what stands after its name.

    Raises:
        UnsupportedModel: For a key that is not known.
    """
    prefix = f"{architecture}."
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key in sorted(named.keys() - kinds.keys()):
        raise UnsupportedModel(
            f"{origin}: the key {prefix}{key} is not known here, so the head might not run as trained"
        )
    return Fields(named, origin, kinds)


def head_config(file: GGUFFile, fields: Fields, *, normed: bool = False) -> ModelConfig:
    """The sizes of a head's blocks, as those of a model.

    Args:
        file: The file.
        fields: Its metadata.
        normed: Whether queries and keys are normed.
    """
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
        num_layers=fields.need("block_count"),
        num_heads=heads,
        num_kv_heads=fields.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=fields.need("context_length"),
        norm_eps=fields.need("attention.layer_norm_rms_epsilon"),
        rope=read_rope(file, fields, 10_000.0, head_dim),
        qk_norm=normed,
    )
    check_config(config, fields.origin)
    return config


def head_tensors(
    file: GGUFFile, layers: Mapping[int, str], block: Mapping[str, str], others: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The tensors of a file by what folders call them, whatever else there is by its own name.

    Args:
        file: The file.
        layers: How folders begin the names of every block.
        block: What a block has beside what all blocks have, by what stands after its number.
        others: What is in no block, beside what all heads have.
    """
    known = _NAMES | dict(others)
    for number, prefix in layers.items():
        known |= {f"blk.{number}.{name}": f"{prefix}{theirs}" for name, theirs in (_BLOCK | dict(block)).items()}
    found = {}
    for name in file.tensors:
        path, _, kind = name.rpartition(".")
        if name not in ("d2t", FREQUENCIES):
            found[f"{known.get(path, path)}.{kind}"] = torch.from_numpy(file.rows(name)).clone()
    if "d2t" in file.tensors:
        # Token ids, where folders have offsets.
        ids = torch.from_numpy(file.integers("d2t"))
        found["d2t"] = ids - torch.arange(len(ids), dtype=torch.int64, device="cpu")
    return found


def entered(fields: Fields, older: str = "target_layers") -> list[int]:
    """The layers of the target that the states enter which a head reads.

    Args:
        fields: The metadata of its file.
        older: What the key was called once.
    """
    known = fields.get(older)
    return [int(layer) for layer in (fields.need("target_layers") if known is None else known)]


def coded(file: GGUFFile) -> bool:
    """Whether a head's matrices are quantized."""
    return file.kind_name("fc.weight") not in _FLOATS
