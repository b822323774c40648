"""A small diffusion model and its tokenizer of lists, kept as LLaDA's and LLaDA-MoE's checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from decodery.models.config import ModelConfig
from decodery.models.families.tensor_names import tensor_name
from decodery.models.loaders.fused import slots
from decodery.models.loaders.store import replacing, write_text
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense

from .lists import END, MASK, VOCABULARY

MODEL = "model.safetensors"


def named_tensors(model: Transformer) -> dict[str, torch.Tensor]:
    """All weights by name, as the model has them in memory."""
    weights, found = model.weights, dict[str, torch.Tensor]()
    for number, layer in enumerate(weights.layers):
        for name, part in vars(layer).items():
            if part is not None:
                found[f"layers.{number}.{name}.weight"] = part.weight if isinstance(part, Dense) else part
    assert isinstance(weights.head, Dense)
    return found | {
        "embedding.weight": weights.embedding, "norm.weight": weights.norm, "head.weight": weights.head.weight
    }  # fmt: skip


def write_llada(model: Transformer, out: Path) -> None:
    """Keep a model and the tokenizer of lists as LLaDA's folders do."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = model.config
    whole, tensors = named_tensors(model), dict[str, torch.Tensor]()
    for slot in slots(config):
        pieces = whole[slot.name].detach().chunk(len(slot.parts))
        for part, piece in zip(slot.parts, pieces, strict=True):
            tensors[tensor_name(part, config)] = piece.contiguous()
    described = _described_moe(config) if config.experts else {
        "model_type": "llada", "architectures": ["LLaDAModelLM"], "activation_type": "silu", "block_type": "llama",
        "layer_norm_type": "rms", "rope": True, "rope_theta": config.rope.theta, "rms_norm_eps": config.norm_eps,
        "d_model": config.hidden_size, "mlp_hidden_size": config.intermediate_size, "n_layers": config.num_layers,
        "n_heads": config.num_heads, "n_kv_heads": config.num_kv_heads, "max_sequence_length": config.max_positions,
        "vocab_size": config.vocab_size, "embedding_size": config.vocab_size, "weight_tying": False,
        "mask_token_id": config.mask_id, "eos_token_id": config.eos_ids[0],
    }  # fmt: skip
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(VOCABULARY)}, unk_token="_"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Nothing between words that are written, so that JSON is what a grammar takes for it.
    words.decoder = decoders.Fuse()
    words.add_special_tokens([END, MASK])
    with replacing(out / "tokenizer.json") as temporary:
        words.save(str(temporary))
    write_text(out / "config.json", json.dumps(described, indent=1))
    with replacing(out / MODEL) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def _described_moe(config: ModelConfig) -> dict[str, Any]:
    """A configuration in the names of LLaDA-MoE's."""
    return {
        "model_type": "llada_moe", "architectures": ["LLaDAMoEModelLM"], "hidden_act": "silu", "qk_layernorm": True,
        "hidden_size": config.hidden_size, "expert_intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size, "tie_word_embeddings": False, "rope_theta": config.rope.theta,
        "rms_norm_eps": config.norm_eps, "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token, "mask_token_id": config.mask_id,
        "eos_token_id": config.eos_ids[0],
    }  # fmt: skip
