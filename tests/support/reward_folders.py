"""Folders of published reward models, with random weights and a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
import transformers

from serving import TEMPLATE
from tiny_models import SPECIAL, byte_alphabet, randomize

SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 257, "bos_token_id": None,
    "pad_token_id": 257,
}  # fmt: skip


def tokenizer() -> Any:
    """Bytes, and a token of two of them: what is read apart has other tokens than what is read in one."""
    vocabulary = byte_alphabet() | {".\u010a": 256}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(".", "\u010a")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL, "<extra_0>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"])
    return backend


def save(
    folder: Path,
    model: Any,
    head: dict[str, torch.Tensor] | None = None,
    settings: dict[str, str] | None = None,
    **config: Any,
) -> Path:
    """A folder as such models are published, with a head of its own beside the model's tensors."""
    model.save_pretrained(folder)
    if head:
        file = folder / "model.safetensors"
        kept = {name: each for name, each in safetensors.torch.load_file(file).items() if name != "lm_head.weight"}
        safetensors.torch.save_file(kept | head, file)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE} | (settings or {})))
    return folder


def causal(seed: int = 0) -> Any:
    return randomize(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False)), seed)
