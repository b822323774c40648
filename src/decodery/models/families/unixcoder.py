"""UniXcoder: a RoBERTa whose mode is said by a token, and by what its tokens see of each other.

UniXcoder: Unified Cross-Modal Pre-training for Code Representation (2022). As a decoder it is a causal language
model, which is what `load` gives. As encoder and decoder it reads a prompt with sight both ways and writes after it,
which the source `prefix-lm` does. As an encoder it makes one vector of a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.errors import CorruptFile, PromptError, SettingsError, UnsupportedModel

from ..batch import Batch, Segment
from ..config import EPS, HEADS, LAYERS, POSITIONS, TOKEN_ID, TOKENS, WIDTH, ModelConfig, Rope
from ..loaders.fields import Anything, Fields, Flag, Kind, Listed, Text, Whole, read_json
from ..loaders.folder import read_texts
from ..loaders.shards import Shards
from ..tokenizers.tokenizer import Tokenizer
from ..torch.transformer import Transformer
from ..torch.weights import Dense, Layer, Weights
from .config_json import TOKEN_IDS, token_ids

if TYPE_CHECKING:
    from ..loaders.load import LoadedModel

FAMILY = "unixcoder"
MODES = ("encoder-only", "decoder-only", "encoder-decoder")
_ENDED = ("encoder-only", "encoder-decoder")
"""Modes whose texts end with the separator."""
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CONFIG: dict[str, Kind] = {
    "architectures": Listed(Text(256), 64),
    "vocab_size": TOKENS,
    **dict.fromkeys(("hidden_size", "intermediate_size"), WIDTH),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": Whole(1, 1 << 16),
    "layer_norm_eps": EPS,
    "hidden_act": Text(64),
    "position_embedding_type": Text(64),
    "pad_token_id": TOKEN_ID,
    **dict.fromkeys(("bos_token_id", "eos_token_id"), TOKEN_IDS),
    "add_cross_attention": Flag(),
    "model_type": Anything(),
}


def is_unixcoder(described: Any) -> bool:
    """Whether a config.json is that of a RoBERTa without a head, as UniXcoder's is."""
    return (
        isinstance(described, dict)
        and described.get("model_type") == "roberta"
        and described.get("architectures") == ["RobertaModel"]
    )


def load_unixcoder(folder: Path, name: str, dtype: str, device: torch.device) -> LoadedModel:
    """Read a folder.

    Raises:
        CorruptFile, UnsupportedModel: With a sentence.
    """
    from ..loaders.dtype import choose_dtype
    from ..loaders.load import LoadedModel

    origin = str(folder / "config.json")
    fields = Fields(read_json(folder / "config.json"), origin, _CONFIG)
    backend, facts = read_texts(folder)
    begin, end = (token_ids(fields.get(f"{each}_token_id", number)) for each, number in (("bos", 0), ("eos", 2)))
    if not begin or not end or any(backend.token_to_id(f"<{mode}>") is None for mode in MODES):
        raise UnsupportedModel(f"{folder} is a RoBERTa without the modes of UniXcoder, and cannot write texts")
    tokenizer = Tokenizer(backend, bos_id=begin[0], eos_ids=facts.eos_ids or end)
    config = dataclasses.replace(_config(fields), bos_id=begin[0], eos_ids=tokenizer.eos_ids)
    shards = Shards(folder)
    chosen = choose_dtype(dtype, shards.precision(), device)
    if chosen not in _FLOATS:
        raise SettingsError(f"UniXcoder runs in {', '.join(_FLOATS)}, not in {chosen}")
    skipped = fields.get("pad_token_id", 1) + 1
    weights = read_weights(config, skipped, lambda part: shards.tensor(part).to(device, _FLOATS[chosen]))
    shards.refuse_rest("UniXcoder", ("pooler.", "embeddings.position_ids"))
    shards.close()
    # Plain prompts are those of a decoder; `framed` gives the others.
    _begin_with(backend, [begin[0], _mode_id(tokenizer, "decoder-only"), end[0]])
    config = dataclasses.replace(config, vocabulary=tokenizer.fingerprint())
    return LoadedModel(Transformer(config, weights), tokenizer, None, name, chosen)


def _config(fields: Fields) -> ModelConfig:
    if fields.get("position_embedding_type", "absolute") != "absolute":
        raise fields.unsupported("position_embedding_type")
    if fields.get("hidden_act", "gelu") != "gelu":
        raise fields.unsupported("hidden_act")
    if fields.get("add_cross_attention", False):
        raise fields.unsupported("add_cross_attention")
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    places = fields.need("max_position_embeddings") - fields.get("pad_token_id", 1) - 1
    if hidden % heads or (hidden // heads) % 2 or places < 4:
        raise CorruptFile(f"{fields.origin}: {heads} heads and {places} positions do not fit a width of {hidden}")
    return ModelConfig(
        vocab_size=fields.need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.need("intermediate_size"),
        num_layers=fields.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=places,
        family=FAMILY,
        norm_eps=fields.get("layer_norm_eps", 1e-12),
        rope=Rope(kind="none"),
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu",
        centred_norms=True,
        gated=False,
        learned_positions=True,
        joined_norms=True,
    )


def read_weights(config: ModelConfig, skipped: int, tensor: Callable[[str], torch.Tensor]) -> Weights:
    """All weights, by what gives a tensor under its name in a checkpoint.

    Args:
        skipped: Positions that no token has.
    """
    hidden, inner = config.hidden_size, config.intermediate_size

    def part(name: str, *shape: int) -> torch.Tensor:
        found = tensor(name)
        if found.shape[1:] != torch.Size(shape[1:]) or len(found) < shape[0]:
            raise CorruptFile(f"the tensor {name} has shape {list(found.shape)} in place of {list(shape)}")
        return found

    def norm(name: str) -> torch.Tensor:
        return torch.cat([part(f"{name}.LayerNorm.{kind}", hidden) for kind in ("weight", "bias")])

    def dense(outputs: int, inputs: int, *names: str) -> Dense:
        rows = [part(f"{name}.weight", outputs, inputs) for name in names]
        return Dense(torch.cat(rows), torch.cat([part(f"{name}.bias", outputs) for name in names]))

    def layer(index: int) -> Layer:
        at = f"encoder.layer.{index}"
        return Layer(
            attention_norm=norm(f"{at}.attention.output"),
            qkv=dense(hidden, hidden, *(f"{at}.attention.self.{each}" for each in ("query", "key", "value"))),
            output=dense(hidden, hidden, f"{at}.attention.output.dense"),
            mlp_norm=norm(f"{at}.output"),
            gate_up=dense(inner, hidden, f"{at}.intermediate.dense"),
            down=dense(hidden, inner, f"{at}.output.dense"),
        )

    embedding = part("embeddings.word_embeddings.weight", config.vocab_size, hidden)
    places = part("embeddings.position_embeddings.weight", config.max_positions + skipped, hidden)
    # All tokens are of the first type.
    kind = part("embeddings.token_type_embeddings.weight", 1, hidden)
    return Weights(
        embedding,
        [layer(index) for index in range(config.num_layers)],
        norm("embeddings"),
        Dense(embedding),
        positions=places[skipped:] + kind[0],
    )


def framed(tokenizer: Tokenizer, text: str, mode: str, most: int = 1024) -> list[int]:
    """Token ids of a text in a mode: prefix, tokens and, except for a decoder, suffix.

    Args:
        most: Tokens in all; longer texts lose their end, and those of a decoder, which goes on from there, their begin.

    Raises:
        SettingsError: For a mode that there is not.
    """
    if mode not in MODES:
        raise SettingsError(f"there is no mode {mode!r}: choose {', '.join(MODES)}")
    begin, end = tokenizer.bos_id, tokenizer.eos_ids[0]
    assert begin is not None
    ids, ended = tokenizer.encode(text, special=False), mode in _ENDED
    room = most - 3 - ended
    ids = ids[:room] if ended else ids[-room:]
    return [begin, _mode_id(tokenizer, mode), end, *ids, *([end] if ended else [])]


@torch.no_grad()
def vectors(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """[texts, hidden] unit vectors of the model as an encoder: means over each text's tokens.

    The frame's tokens count.
    """
    found = []
    for text in texts:
        if not text:
            raise PromptError("an empty text has no vector: leave it out")
        ids = np.asarray(framed(tokenizer, text, "encoder-only", model.config.max_positions), dtype=np.int64)
        sight = np.ones((len(ids), len(ids)), dtype=bool)
        segment = Segment(np.arange(len(ids)), ids, mask=sight, logit_rows=[])
        states = model.forward(Batch([segment]), taps=(-1,)).hidden[-1]
        found.append(torch.nn.functional.normalize(states.mean(dim=0), dim=0))
    return torch.stack(found)


def _mode_id(tokenizer: Tokenizer, mode: str) -> int:
    found = tokenizer.token_id(f"<{mode}>")
    assert found is not None
    return found


def _begin_with(backend: Any, ids: Sequence[int]) -> None:
    """Make `encode` begin every text with these tokens."""
    from tokenizers import processors

    first = [backend.id_to_token(id) for id in ids]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A"],
        pair=[*first, "$A", "$B"],
        special_tokens=list(dict(zip(first, ids, strict=True)).items()),
    )
