"""Published heads that are MLPs over the target's last state: those of Medusa, and of vLLM for it, and of Hydra.

Names and shapes are those of the public code (FasterDecoding/Medusa, vllm-project/vllm, zankner/Hydra). How many heads
there are is counted in the file: the number in some configurations of Medusa is known to be wrong.
"""

from __future__ import annotations

from typing import Any

import torch

from decodery.core.errors import CorruptFile
from decodery.models.config import TOKENS, WIDTH
from decodery.models.loaders.fields import Fields, Flag, Kind, Number, Text, Whole

from .checkpoint import Tensors

_FEW = Whole(1, 64)
SETTINGS: dict[str, Kind] = {
    "medusa_num_heads": _FEW,
    "medusa_num_layers": _FEW,
    "medusa_fc_bias": Flag(),
    "num_heads": _FEW,
    "num_hidden_layers": Whole(1, 1 << 12),
    "hidden_size": WIDTH,
    "vocab_size": TOKENS,
    "truncated_vocab_size": TOKENS,
    "original_lm_head": Flag(),
    "logit_scale": Number(-1e6, 1e6),
    "hydra_num_heads": _FEW,
    "hydra_num_layers": _FEW,
    "hydra_head_arch": Text(64),
    "grounded_heads": Flag(),
    "hidden_state_offset": Whole(0, 1 << 12),
}
Made = tuple[dict[str, torch.Tensor], dict[str, Any]]


def medusa(settings: Fields, tensors: Tensors) -> Made:
    """Heads in the published form: blocks and a vocabulary projection unless it is the target's."""
    blocks = settings.get("medusa_num_layers", 1)
    hidden, _ = tensors.size("0.0.linear.weight")
    own = f"0.{blocks}.weight" in tensors
    outputs = tensors.size(f"0.{blocks}.weight")[0] if own else 0
    found: dict[str, torch.Tensor] = {}
    heads = tensors.count("{}.0.linear.weight")
    for head in range(heads):
        for block in range(blocks):
            found |= tensors.linear(f"head.{head}.{block}", {f"{head}.{block}.linear": hidden}, hidden)
        if own:
            found |= tensors.linear(f"lm_head.{head}", {f"{head}.{blocks}": outputs}, hidden)
    return found, {"heads": heads, "blocks": blocks}


def vllm_medusa(settings: Fields, tensors: Tensors) -> Made:
    """The same heads under vLLM's names, which may share a projection and speak a part of the vocabulary."""
    if settings.get("logit_scale", 1.0) != 1.0:
        raise settings.unsupported("logit_scale")
    blocks = settings.get("num_hidden_layers", settings.get("medusa_num_layers", 1))
    hidden, words = settings.need("hidden_size"), settings.need("vocab_size")
    spoken = settings.get("truncated_vocab_size", words)
    heads, found = tensors.count("blocks.{}.layers.0.weight"), dict[str, torch.Tensor]()
    for head in range(heads):
        for block in range(blocks):
            found |= tensors.linear(f"head.{head}.{block}", {f"blocks.{head}.layers.{block}": hidden}, hidden)
    if settings.get("original_lm_head", False):
        named = {"lm_head": "lm_head" if "lm_head.weight" in tensors else "lm_heads.0"}
    else:
        named = {f"lm_head.{head}": f"lm_heads.{head}" for head in range(heads)}
    for name, theirs in named.items():
        found |= tensors.linear(name, {theirs: tensors.size(f"{theirs}.weight")[0]}, hidden)
    if "lm_head" in named:
        # Copies of the one that is shared.
        tensors.drop("lm_heads.")
    if spoken < words:
        chosen = tensors.take("token_map", spoken).long()
        if not 0 <= int(chosen.min()) <= int(chosen.max()) < words:
            raise CorruptFile(f"{tensors.path}: token_map names tokens beyond the {words} there are")
        found["vocabulary"] = chosen.int()
        # Some files keep the rows of all tokens.
        found |= {f"{name}.weight": _rows(found[f"{name}.weight"], chosen, words) for name in named}
    else:
        tensors.drop("token_map")
    for name, theirs in named.items():
        if (rows := len(found[f"{name}.weight"])) != spoken:
            raise CorruptFile(f"{tensors.path}: {theirs}.weight has {rows} rows, and should have {spoken}")
    return found, {"heads": heads, "blocks": blocks}


def _rows(weight: torch.Tensor, chosen: torch.Tensor, words: int) -> torch.Tensor:
    return weight[chosen] if len(weight) == words else weight


def hydra(settings: Fields, tensors: Tensors) -> Made:
    """Heads that read tokens, each with a projection of its own.

    With a prefix layer, whose shape is the target's.
    """
    if settings.get("hydra_head_arch", "mlp") not in ("mlp", "prefix-mlp"):
        raise settings.unsupported("hydra_head_arch")
    if not settings.get("grounded_heads", False):
        raise settings.unsupported("grounded_heads")
    if settings.get("hidden_state_offset", 0):
        raise settings.unsupported("hidden_state_offset")
    prefix = settings.get("hydra_head_arch") == "prefix-mlp"
    # Where there is a prefix, dropout layers take every other number.
    places = [2 * block + 1 if prefix else block for block in range(settings.get("hydra_num_layers", 1))]
    end = ".1" if prefix else ""
    hidden, _ = tensors.size(f"hydra_mlp.0.{places[0]}.linear.weight")
    outputs, _ = tensors.size(f"hydra_lm_head.0{end}.weight")
    heads = tensors.count("hydra_mlp.{}." + f"{places[0]}.linear.weight")
    found: dict[str, torch.Tensor] = {}
    for head in range(heads):
        theirs, width = f"hydra_mlp.{head}", (head + 2) * hidden
        found |= tensors.linear(f"head.{head}.through", {f"{theirs}.{places[0]}.res_connection": hidden}, width)
        for block, place in enumerate(places):
            found |= tensors.linear(
                f"head.{head}.{block}", {f"{theirs}.{place}.linear": hidden}, hidden if block else width
            )
        found |= tensors.linear(f"lm_head.{head}", {f"hydra_lm_head.{head}{end}": outputs}, hidden)
    about = {"heads": heads, "blocks": len(places)}
    if not prefix:
        return found, about
    name = "prefix_embeding_layer."
    layer = f"{name}layers.0."
    (own, _), (shared, _) = (tensors.size(f"{layer}self_attn.{each}_proj.weight") for each in "qk")
    inner, _ = tensors.size(f"{layer}mlp.gate_proj.weight")
    found |= tensors.layer(layer, hidden=hidden, inner=inner, own=own, shared=shared, width=hidden)
    found["layer.attention_norm.weight"] = tensors.take(f"{layer}input_layernorm.weight", hidden)
    found["norm.weight"] = tensors.take(f"{name}norm.weight", hidden)
    # Its configuration says nothing of the layer's shape, which is that of the target's layers.
    return found, about | {"layer": "target", "reads_normed": True}
