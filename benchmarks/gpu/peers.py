"""The same weights in `transformers`, whose `generate` is timed beside this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from counting import timed
from kit import NotRunError

from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense


def clone(model: Transformer) -> Any:
    """A `LlamaForCausalLM` over the tensors of `model`, which are not copied.

    Raises:
        NotRunError: If `transformers` is not installed, or the model is no plain Llama in floating point.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        raise NotRunError(f"transformers cannot be imported: {error}") from error
    config, weights = model.config, model.weights
    if config.rope.kind != "default" or not all(isinstance(layer.qkv, Dense) for layer in weights.layers):
        raise NotRunError("these weights are no plain Llama in floating point, which is what the kit builds there")
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        # Version 4 of transformers reads the one, version 5 the other.
        rope_theta=config.rope.theta,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        found = LlamaForCausalLM(theirs)
    assert isinstance(weights.head, Dense)
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    tensors["lm_head.weight"] = weights.head.weight
    for index, layer in enumerate(weights.layers):
        tensors |= {f"model.layers.{index}.{name}.weight": each for name, each in _layer(layer, model).items()}
    found.load_state_dict(tensors, assign=True)
    with model.device:
        found.model.rotary_emb = LlamaRotaryEmbedding(theirs)
    found.generation_config.eos_token_id = None
    return found.eval()


def _layer(layer: Any, model: Transformer) -> dict[str, torch.Tensor]:
    config = model.config
    sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    queries, keys, values = layer.qkv.weight.split(sizes)
    gate, up = layer.gate_up.weight.chunk(2)
    return {
        "input_layernorm": layer.attention_norm,
        "self_attn.q_proj": queries,
        "self_attn.k_proj": keys,
        "self_attn.v_proj": values,
        "self_attn.o_proj": layer.output.weight,
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down.weight,
    }


@torch.no_grad()
def generated(model: Any, prompts: Sequence[Sequence[int]], tokens: int, *, static: bool) -> float:
    """Tokens per second of greedy `generate` over prompts of one length.

    static: with a cache of fixed size, whose passes `generate` compiles by itself on a GPU.
    """
    ids = torch.tensor(prompts, device=model.device)
    settings: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    if static:
        settings["cache_implementation"] = "static"

    def run() -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    return len(prompts) * tokens / timed(model.device, run, 1, warm=1)


@torch.no_grad()
def logits_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[n, vocab] logits of one pass."""
    return model(torch.tensor([list(tokens)], device=model.device), use_cache=False).logits[0]
