"""T5 and CodeT5+ checkpoints: a folder of config.json, safetensors and tokenizer, read and written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decodery.core.errors import CorruptFile, SettingsError, UnsupportedModel

from ..config import EPS, HEAD_DIM, HEADS, LAYERS, POSITIONS, TOKEN_ID, TOKENS, WIDTH
from ..loaders.dtype import choose_dtype
from ..loaders.fields import Fields, Flag, Kind, Listed, Text, Whole, read_json
from ..loaders.folder import read_texts
from ..loaders.load import LoadedModel
from ..loaders.shards import Shards
from ..loaders.store import replacing, write_text
from ..tokenizers.tokenizer import Tokenizer
from ..torch.encoder_decoder import Block, Cross, EncoderDecoder, EncoderDecoderConfig, EncoderDecoderWeights, Stack
from ..torch.weights import Dense
from .config_json import TOKEN_IDS, token_ids

if TYPE_CHECKING:
    import tokenizers

FAMILY = "t5"
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ACTIVATIONS = {
    "relu": ("relu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-relu": ("relu", True),
    "gated-silu": ("silu", True),
    "gelu_new": ("gelu_tanh", False),
}
_CONFIG: dict[str, Kind] = {
    "model_type": Text(64),
    "architectures": Listed(Text(256), 64),
    "vocab_size": TOKENS,
    **dict.fromkeys(("d_model", "d_ff"), WIDTH),
    "d_kv": HEAD_DIM,
    **dict.fromkeys(("num_layers", "num_decoder_layers"), LAYERS),
    "num_heads": HEADS,
    "n_positions": POSITIONS,
    "relative_attention_num_buckets": Whole(4, 1 << 14),
    "relative_attention_max_distance": POSITIONS,
    "layer_norm_epsilon": EPS,
    "feed_forward_proj": Text(64),
    **dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs"), Flag()),
    "decoder_start_token_id": TOKEN_ID,
    "pad_token_id": TOKEN_ID,
    "eos_token_id": TOKEN_IDS,
    "bos_token_id": TOKEN_IDS,
    "encoder_block": Whole(1, 1 << 20),
}
_SKIPPED = (
    *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)
"""Copies of the one table, and what was never used in old checkpoints."""
_WRITTEN = "T5ForConditionalGeneration"


def read_t5_config(raw: Any, origin: str = "config.json") -> EncoderDecoderConfig:
    """The configuration of a T5.

    Raises:
        UnsupportedModel: By name for what could not be run faithfully.
    """
    fields = Fields(raw, origin, _CONFIG)
    if any(name not in (_WRITTEN, "T5Model", "T5WithLMHeadModel") for name in fields.get("architectures", [])):
        raise UnsupportedModel(f"{origin}: architectures = {fields.get('architectures')} is not supported")
    projection = fields.get("feed_forward_proj", "relu")
    if projection not in _ACTIVATIONS:
        raise fields.unsupported("feed_forward_proj")
    activation, gated = _ACTIVATIONS[projection]
    layers, vocab = fields.need("num_layers"), fields.need("vocab_size")
    start = fields.get("decoder_start_token_id", fields.get("pad_token_id", 0))
    ends = token_ids(fields.get("eos_token_id", 1))
    if not all(0 <= id < vocab for id in (start, *ends)):
        raise CorruptFile(f"{origin}: a token that begins or ends texts is outside the vocabulary of {vocab}")
    distance, buckets = (fields.get(f"relative_attention_{name}") for name in ("max_distance", "num_buckets"))
    if (distance or 128) <= (buckets or 32):
        raise CorruptFile(f"{origin}: relative_attention_max_distance should be above the number of buckets")
    heads = fields.need("num_heads")
    return EncoderDecoderConfig(
        vocab_size=vocab,
        hidden_size=fields.need("d_model"),
        intermediate_size=fields.need("d_ff"),
        num_layers=fields.get("num_decoder_layers", layers),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=fields.need("d_kv"),
        max_positions=fields.get("n_positions", 512),
        family=FAMILY,
        norm_eps=fields.get("layer_norm_epsilon", 1e-6),
        activation=activation,
        attention_scale=1.0,
        bos_id=start,
        eos_ids=ends,
        encoder_layers=layers,
        buckets=buckets or 32,
        max_distance=distance or 128,
        gated=gated,
        scaled_head=fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True)),
        start_id=start,
        block=fields.get("encoder_block"),
    )


def load_t5(folder: Path, name: str, dtype: str, device: torch.device) -> LoadedModel:
    """Read a folder.

    Raises:
        CorruptFile, UnsupportedModel: With a sentence.
    """
    config = read_t5_config(read_json(folder / "config.json"), str(folder / "config.json"))
    shards = Shards(folder)
    chosen = choose_dtype(dtype, shards.precision(), device)
    if chosen not in _FLOATS:
        raise SettingsError(f"models of an encoder and a decoder run in {', '.join(_FLOATS)}, not in {chosen}")
    weights = read_weights(config, lambda part: shards.tensor(part).to(device, _FLOATS[chosen]), shards.names)
    shards.refuse_rest(FAMILY, _SKIPPED)
    backend, facts = read_texts(folder)
    tokenizer = Tokenizer(backend, bos_id=config.start_id, eos_ids=facts.eos_ids or config.eos_ids)
    shards.close()
    config = dataclasses.replace(config, eos_ids=tokenizer.eos_ids, vocabulary=tokenizer.fingerprint())
    return LoadedModel(EncoderDecoder(config, weights), tokenizer, None, name, chosen)


def read_weights(
    config: EncoderDecoderConfig, tensor: Callable[[str], torch.Tensor], names: Any
) -> EncoderDecoderWeights:
    """All weights, by what gives a tensor under its name in a checkpoint.

    Args:
        names: Those that there are.
    """

    def part(name: str, *shape: int) -> torch.Tensor:
        found = tensor(name)
        if tuple(found.shape) != shape:
            raise CorruptFile(f"the tensor {name} has shape {list(found.shape)} in place of {list(shape)}")
        return found

    hidden, inner, wide = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim

    def attention(place: str, kind: str, *which: str) -> Dense:
        return Dense(torch.cat([part(f"{place}.{kind}.{each}.weight", wide, hidden) for each in which]))

    def block(stack: str, index: int) -> Block:
        at = f"{stack}.block.{index}.layer"
        last, cross = (1, None) if stack == "encoder" else (2, f"{at}.1")
        ups = ("wi_0", "wi_1") if config.gated else ("wi",)
        mlp = f"{at}.{last}"
        return Block(
            attention_norm=part(f"{at}.0.layer_norm.weight", hidden),
            qkv=attention(f"{at}.0", "SelfAttention", "q", "k", "v"),
            output=Dense(part(f"{at}.0.SelfAttention.o.weight", hidden, wide)),
            mlp_norm=part(f"{mlp}.layer_norm.weight", hidden),
            up=Dense(torch.cat([part(f"{mlp}.DenseReluDense.{each}.weight", inner, hidden) for each in ups])),
            down=Dense(part(f"{mlp}.DenseReluDense.wo.weight", hidden, inner)),
            cross=None
            if cross is None
            else Cross(
                norm=part(f"{cross}.layer_norm.weight", hidden),
                query=attention(cross, "EncDecAttention", "q"),
                key_value=attention(cross, "EncDecAttention", "k", "v"),
                output=Dense(part(f"{cross}.EncDecAttention.o.weight", hidden, wide)),
            ),
        )

    def stack(kind: str, layers: int) -> Stack:
        return Stack(
            [block(kind, index) for index in range(layers)],
            part(f"{kind}.final_layer_norm.weight", hidden),
            part(
                f"{kind}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", config.buckets, config.num_heads
            ),
            ahead=kind == "encoder",
        )

    # Some files keep the one table under its name in the encoder alone.
    shared = next((each for each in ("shared.weight", "encoder.embed_tokens.weight") if each in names), "shared.weight")
    embedding = part(shared, config.vocab_size, hidden)
    head = part("lm_head.weight", config.vocab_size, hidden) if "lm_head.weight" in names else embedding
    return EncoderDecoderWeights(
        embedding, stack("encoder", config.encoder_layers), stack("decoder", config.num_layers), Dense(head)
    )


def tensors(config: EncoderDecoderConfig, weights: EncoderDecoderWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights under their names in a checkpoint; what `read_weights` reads."""
    yield "shared.weight", weights.embedding
    if weights.head.weight is not weights.embedding:
        yield "lm_head.weight", weights.head.weight
    for kind, stack in (("encoder", weights.encoder), ("decoder", weights.decoder)):
        yield f"{kind}.final_layer_norm.weight", stack.norm
        yield f"{kind}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", stack.distance
        for index, block in enumerate(stack.blocks):
            at = f"{kind}.block.{index}.layer"
            yield f"{at}.0.layer_norm.weight", block.attention_norm
            for name, rows in zip("qkv", block.qkv.weight.chunk(3), strict=True):
                yield f"{at}.0.SelfAttention.{name}.weight", rows
            yield f"{at}.0.SelfAttention.o.weight", block.output.weight
            if block.cross is not None:
                yield f"{at}.1.layer_norm.weight", block.cross.norm
                rows = torch.cat([block.cross.query.weight, block.cross.key_value.weight])
                for name, some in zip("qkv", rows.chunk(3), strict=True):
                    yield f"{at}.1.EncDecAttention.{name}.weight", some
                yield f"{at}.1.EncDecAttention.o.weight", block.cross.output.weight
            mlp = f"{at}.{1 if block.cross is None else 2}"
            yield f"{mlp}.layer_norm.weight", block.mlp_norm
            ups = ("wi_0", "wi_1") if config.gated else ("wi",)
            for name, rows in zip(ups, block.up.weight.chunk(len(ups)), strict=True):
                yield f"{mlp}.DenseReluDense.{name}.weight", rows
            yield f"{mlp}.DenseReluDense.wo.weight", block.down.weight


def save_t5(folder: Path, model: EncoderDecoder, tokenizer: tokenizers.Tokenizer) -> None:
    """Write a folder that `load` reads, and transformers where the encoder sees all of a source at once."""
    from safetensors.torch import save_file

    config = model.config
    kinds = {value: name for name, value in _ACTIVATIONS.items()}
    described = {
        "model_type": FAMILY,
        "architectures": [_WRITTEN],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_ff": config.intermediate_size,
        "d_kv": config.head_dim,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.num_layers,
        "num_heads": config.num_heads,
        "n_positions": config.max_positions,
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": kinds[config.activation, config.gated],
        "tie_word_embeddings": config.scaled_head,
        "decoder_start_token_id": config.start_id,
        "pad_token_id": config.start_id,
        "eos_token_id": list(config.eos_ids),
        **({} if config.block is None else {"encoder_block": config.block}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary), pretty=False)
    write_text(folder / "config.json", json.dumps(described, indent=1) + "\n")
    parts = {name: tensor.detach().contiguous().clone() for name, tensor in tensors(config, model.weights)}
    with replacing(folder / "model.safetensors") as temporary:
        save_file(parts, temporary)
