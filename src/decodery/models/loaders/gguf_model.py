"""From the metadata and tensors of a GGUF file to `ModelConfig` and the parts of `Weights`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodery.core.errors import CorruptFile, UnsupportedModel
from decodery.core.native.kernels import Form

from ..config import (
    EPS,
    FACTOR,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    SCALE,
    THETA,
    TOKEN_ID,
    TOKENS,
    WIDTH,
    ModelConfig,
    Rope,
)
from ..families.masked import LIKE
from ..native.block_linear import BlockLinear
from ..native.int4 import Int4Linear
from ..tokenizers.tokenizer import TextFacts
from .config_check import check_config
from .fields import Array, Either, Fields, Flag, Kind, Number, Text, Whole
from .fused_slots import slots
from .gguf_blocks import FOUR_BITS, READ
from .gguf_file import GGUFFile
from .gguf_states import KINDS, STATES, flat_part, state_name, states_config, vector
from .gguf_tokenizer import read_texts
from .in_place import Piece

if TYPE_CHECKING:
    import tokenizers

_FAMILIES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"},
    **{"llada": "llada", "dream": "Dream"},
    **STATES,
}
_PAIRED = ("llama", "llada")
"""Families whose files have the two numbers that are turned together side by side."""
# What these keys switch on is not in the forward pass; zero is how files say "off".
_UNSUPPORTED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "rope.scaling.yarn_log_multiplier",
)
_GENERAL: dict[str, Kind] = {
    "general.architecture": Text(64),
    "diffusion.shift_logits": Flag(),
    "tokenizer.ggml.mask_token_id": TOKEN_ID,
}
_CONFIG: dict[str, Kind] = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.causal": Flag(),
    "attention.scale": SCALE,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.sliding_window": Whole(0, POSITIONS.most),
    "attention.sliding_window_pattern": Either(Whole(0, LAYERS.most), Array(LAYERS.most)),
    "context_length": POSITIONS,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": THETA,
    "rope.freq_base_swa": THETA,
    "rope.scaling.type": Text(64),
    "rope.scaling.factor": FACTOR,
    "rope.scaling.attn_factor": SCALE,
    "rope.scaling.original_context_length": POSITIONS,
    "rope.scaling.yarn_beta_fast": SCALE,
    "rope.scaling.yarn_beta_slow": SCALE,
    **dict.fromkeys(_UNSUPPORTED, Number(-1e9, 1e9)),
    **KINDS,
}
_HEAD = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
}
_FREQUENCIES = "rope_freqs.weight"


class GGUFCheckpoint:
    """A GGUF file as a source of weights.

    Args:
        precision: Of most of the layers' weights: a floating point type, "int4" for blocks of four bits that stay as
            they are, or "quantized".
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile.whole(path)
        self.origin = str(path)
        self.config = self._read_config()
        self.precision = self._read_precision()
        self._refuse_unread()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the part `name`.

        Raises:
            CorruptFile: If the file has none.
        """
        shape = self.file.info(self._name(name)).shape
        return (math.prod(shape),) if flat_part(name) else shape

    def part(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of the part `name` (see `fused_slots`) in float32."""
        if flat_part(name):
            return vector(name, torch.from_numpy(self.file.rows(self._name(name))))[begin:end]
        return self._rows(name, begin, end, lambda *span: (torch.from_numpy(self.file.rows(*span)),))[0]

    def form(self, name: str) -> Form | None:
        """The form of blocks in which a part's numbers stay as they are; None where they do not."""
        reader = READ.get(self.file.kind_name(self._name(name)))
        return reader and reader.form

    def blocks(self, name: str, begin: int, end: int) -> Int4Linear | BlockLinear:
        """Rows of a part that has such a form."""
        read = self.file.blocks
        weight, first, second = self._rows(name, begin, end, lambda *span: map(torch.from_numpy, read(*span)))
        if self.form(name) == Form.BLOCKS4:
            return Int4Linear(weight, first, second)
        return BlockLinear(weight, torch.stack((first, second), dim=-1))

    @property
    def size(self) -> int:
        """Of the file in bytes."""
        return self.file.size

    def piece(self, name: str) -> Piece | None:
        """Where a part lies, if it consists of blocks that can be read in place."""
        tensor = self._name(name)
        info, kind = self.file.info(tensor), self.file.kind_name(tensor)
        if kind not in READ or len(info.shape) != 2:
            return None
        rows, dim = info.shape[0], self.config.head_dim
        turned = dim if self._pairs(name) and rows % dim == 0 else 0
        return Piece(kind, info.offset, rows, info.shape[1], turned)

    def _pairs(self, name: str) -> bool:
        """Whether rotated pairs of a part lie side by side."""
        return self.config.family in _PAIRED and name.startswith("layers.") and name.split(".")[2] in ("q", "k")

    def _rows(
        self, name: str, begin: int, end: int | None, read: Callable[[str, int, int], Iterable[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """What `read` gives of rows of a part, in our order."""
        tensor, rows, dim = self._name(name), self.shape(name)[0], self.config.head_dim
        end = rows if end is None else end
        if not self._pairs(name) or rows % dim:
            return list(read(tensor, begin, end))
        # Rows move within their heads: whole heads are read.
        first = begin // dim * dim
        found = read(tensor, first, -(-end // dim) * dim)
        return [_pairs_to_halves(each, dim)[begin - first : end - first] for each in found]

    def _name(self, part: str) -> str:
        """What the file calls `part`."""
        if self.config.mamba is not None and part.startswith("layers."):
            _, layer, name = part.split(".", 2)
            if (own := state_name(name, self.config.family)) is not None:
                return f"blk.{layer}.{own}"
        return _tensor_name(part)

    def texts(self) -> tuple[tokenizers.Tokenizer, TextFacts]:
        """The tokenizer and what goes with it."""
        return read_texts(self.file.metadata, self.origin)

    def close(self) -> None:
        self.file.close()

    def _read_config(self) -> ModelConfig:
        file, origin = self.file, self.origin
        general = Fields(file.metadata, origin, _GENERAL)
        architecture = general.get("general.architecture")
        if architecture not in _FAMILIES:
            raise UnsupportedModel(
                f"{origin}: the architecture {architecture!r} is not one of {', '.join(_FAMILIES)}: give the "
                "safetensors folder or the Hub id that the file was made from, which may run through transformers"
            )
        prefix = f"{architecture}."
        named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        if architecture == "mamba2":
            # There are no heads and no MLPs, which files say by zeros.
            named = {key: value for key, value in named.items() if value != 0}
        fields = Fields(named, origin, _CONFIG)
        for key in _UNSUPPORTED:
            if fields.get(key):
                raise fields.unsupported(key)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CorruptFile(f"{origin} has no token embedding: the file is incomplete")
        TOKENS.check(embedding.shape[0], f"{origin}: the number of tokens")
        family = _FAMILIES[architecture]
        if architecture in STATES:
            tied, normed = "output.weight" not in file.tensors, "blk.0.ssm_norm.weight" in file.tensors
            config = states_config(fields, family, embedding.shape[0], tied, normed)
            return self._turned(fields, config) if any(config.attending_layers) else config
        masked = family in LIKE
        if fields.get("attention.causal", not masked) == masked:
            raise fields.unsupported("attention.causal")
        gemma = family == "gemma3_text"
        layers = fields.need("block_count")
        hidden, heads = fields.need("embedding_length"), fields.need("attention.head_count")
        head_dim = fields.get("attention.key_length", max(hidden // heads, 1))
        _same_width(fields, head_dim)
        window, sliding = _sliding(fields, gemma, layers)
        # The largest Gemma 3 alone scales by the width of its heads in the residual stream.
        scale = (hidden / heads if gemma and layers == 62 else head_dim) ** -0.5
        config = ModelConfig(
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=fields.need("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=fields.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_positions=fields.need("context_length"),
            family=family,
            norm_eps=fields.need("attention.layer_norm_rms_epsilon"),
            rope=self._rope(fields, 1_000_000.0 if gemma else 10_000.0, head_dim),
            local_rope=Rope(theta=fields.get("rope.freq_base_swa", 10_000.0)) if gemma else None,
            sliding_window=window,
            sliding_layers=sliding,
            tie_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_down.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
            sandwich_norms=gemma,
            activation="gelu_tanh" if gemma else "silu",
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_scale=fields.get("attention.scale", scale),
            causal=not masked,
            mask_id=general.get("tokenizer.ggml.mask_token_id") if masked else None,
            # What llama.cpp takes for granted where a file does not say.
            shifted=masked and general.get("diffusion.shift_logits", True),
        )
        check_config(config, origin)
        return config

    def _turned(self, fields: Fields, config: ModelConfig) -> ModelConfig:
        """A configuration of layers that keep a state, with the rotation of those that attend as well."""
        _same_width(fields, config.head_dim)
        return replace(config, rope=self._rope(fields, 10_000.0, config.head_dim))

    def _rope(self, fields: Fields, theta: float, head_dim: int) -> Rope:
        theta = fields.get("rope.freq_base", theta)
        if _FREQUENCIES in self.file.tensors:
            if self.file.tensors[_FREQUENCIES].shape != (head_dim // 2,):
                raise CorruptFile(f"{self.origin}: {_FREQUENCIES} should hold {head_dim // 2} numbers")
            factors = self.file.rows(_FREQUENCIES).tolist()
            for number, factor in enumerate(factors):
                FACTOR.check(factor, f"{self.origin}: {_FREQUENCIES}[{number}]")
            return Rope(theta=theta, kind="factors", factors=tuple(factors))
        kind = fields.get("rope.scaling.type", "none")
        if kind == "none":
            return Rope(theta=theta)
        factor = fields.need("rope.scaling.factor")
        if kind == "linear":
            return Rope(theta=theta, kind="linear", factor=factor)
        if kind != "yarn":
            raise fields.unsupported("rope.scaling.type")
        if fields.get("rope.scaling.attn_factor", 1.0) != 1.0:
            raise fields.unsupported("rope.scaling.attn_factor")
        return Rope(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_positions=fields.need("rope.scaling.original_context_length"),
            beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
        )

    def _read_precision(self) -> str:
        sizes: Counter[str] = Counter()
        for name, info in self.file.tensors.items():
            # Small models are mostly vocabulary, which says nothing of the rest.
            if len(info.shape) == 2 and name.startswith("blk."):
                sizes[self.file.kind_name(name)] += info.shape[0] * info.shape[1]
        if 2 * sum(sizes[kind] for kind in FOUR_BITS) > sizes.total():
            return "int4"
        kind = sizes.most_common(1)[0][0] if sizes else "F32"
        return {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, "quantized")

    def _refuse_unread(self) -> None:
        """A tensor that would not be used means a part of the model that would not be run."""
        used = {self._name(part) for slot in slots(self.config) for part in slot.parts}
        for name in self.file.tensors:
            if name not in used and name != _FREQUENCIES and not name.endswith("attn_rot_embd"):
                raise UnsupportedModel(f"{self.origin}: the tensor {name} belongs to a part that is not supported")


def _same_width(fields: Fields, head_dim: int) -> None:
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, head_dim) != head_dim:
            raise fields.unsupported(key)


def _sliding(fields: Fields, gemma: bool, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = fields.get("attention.sliding_window")
    if not window:
        return None, (False,) * layers
    pattern = fields.get("attention.sliding_window_pattern", 6 if gemma else None)
    if pattern is None:
        return window, (True,) * layers
    if isinstance(pattern, int):
        return window, tuple(pattern > 0 and (layer + 1) % pattern != 0 for layer in range(layers))
    if len(pattern) != layers:
        raise CorruptFile(f"{fields.origin}: attention.sliding_window_pattern should have {layers} values")
    return window, tuple(bool(value) for value in pattern)


def _tensor_name(part: str) -> str:
    """What a GGUF file calls `part`, such as "layers.3.q.weight" -> "blk.3.attn_q.weight"."""
    path, kind = part.rsplit(".", 1)
    if path in _HEAD:
        return f"{_HEAD[path]}.{kind}"
    _, layer, name = path.split(".")
    return f"blk.{layer}.{_LAYER[name]}.{kind}"


def _pairs_to_halves(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from rotation pairs side by side, as Llama's GGUF files have them, to halves."""
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
