"""Draft layers as the public code of EAGLE-3.1, P-EAGLE, DFlash, DSpark and MTP heads runs them, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from published import norm

Weights = dict[str, torch.Tensor]


def sizes_of(config: dict[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder layer's tensors whose attention reads `width`."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (heads, width),
        f"{prefix}self_attn.k_proj.weight": (shared, width),
        f"{prefix}self_attn.v_proj.weight": (shared, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, heads),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    if config["model_type"] == "qwen3":
        found |= {f"{prefix}self_attn.{each}_norm.weight": (dim,) for each in "qk"}
    return found


def attention(
    weights: Weights,
    prefix: str,
    config: dict[str, Any],
    rows: torch.Tensor,
    read: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
) -> torch.Tensor:
    """Queries of `rows` [n, width], keys and values of `read` [m, width] -> [n, hidden].

    Args:
        positions: Of the rows, and of what they read.
        seen: [n, m] bool.
    """
    dim, heads, shared = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]

    def projected(name: str, given: torch.Tensor, count: int) -> torch.Tensor:
        return (given @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(given), count, dim)

    def turned(given: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(at.double(), frequencies)
        cos, sin = (torch.cat((each, each), dim=-1)[:, None] for each in (angles.cos(), angles.sin()))
        half = torch.cat((-given[..., dim // 2 :], given[..., : dim // 2]), dim=-1)
        return given * cos + half * sin

    queries, keys = projected("q", rows, heads), projected("k", read, shared)
    if f"{prefix}self_attn.q_norm.weight" in weights:
        queries, keys = (
            norm(each, weights[f"{prefix}self_attn.{name}_norm.weight"]) for each, name in ((queries, "q"), (keys, "k"))
        )
    queries, keys = turned(queries, positions[0]), turned(keys, positions[1])
    keys, values = (each.repeat_interleave(heads // shared, dim=1) for each in (keys, projected("v", read, shared)))
    scores = torch.einsum("nhd,mhd->hnm", queries, keys) / dim**0.5
    chances = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    context = torch.einsum("hnm,mhd->nhd", chances, values).flatten(1)
    return context @ weights[f"{prefix}self_attn.o_proj.weight"].T


def mlp(weights: Weights, prefix: str, stream: torch.Tensor) -> torch.Tensor:
    normed = norm(stream, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (normed @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return stream + (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T


def windows(config: dict[str, Any]) -> list[int | None]:
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    return [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


def causal(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[n, n]: what rows at increasing positions see of each other."""
    apart = positions[:, None] - positions[None]
    return (apart >= 0) & (apart < (window or 1 << 30))


def eagle_rows(
    weights: Weights, config: dict[str, Any], settings: dict[str, Any], embedded: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of an EAGLE-3 head along one path: what is fed back, and what the projection takes."""
    places = torch.arange(len(embedded))
    first = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    normed = norm(features, weights[f"{first}hidden_norm.weight"])
    stream = normed if settings.get("norm_before_residual") else features
    read = torch.cat((norm(embedded, weights[f"{first}input_layernorm.weight"]), normed), dim=1)
    for number, window in enumerate(windows(config)):
        prefix = f"layers.{number}." if number else first
        if number:
            read = norm(stream, weights[f"{prefix}input_layernorm.weight"])
        seen = causal(places, window)
        stream = stream + attention(weights, prefix, config, read, read, (places, places), seen)
        stream = mlp(weights, prefix, stream)
    last = norm(stream, weights["norm.weight"])
    return (last if settings.get("norm_output") else stream), last


def enter(weights: Weights, settings: dict[str, Any], states: list[torch.Tensor]) -> torch.Tensor:
    if settings.get("fc_norm"):
        states = [norm(each, weights[f"fc_norm.{number}.weight"]) for number, each in enumerate(states)]
    joined = torch.cat(states, dim=1)
    if settings.get("norm_before_fc"):
        joined = norm(joined, weights["input_norm.weight"])
    return joined @ weights["fc.weight"].T


def block_rows(
    weights: Weights,
    config: dict[str, Any],
    settings: dict[str, Any],
    states: list[torch.Tensor],
    embedded: torch.Tensor,
    *,
    of_speculators: bool,
) -> torch.Tensor:
    """The normed rows [block, hidden] of a DFlash block after a text whose states [n, width] are given."""
    context = norm(torch.cat(states, dim=1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    n, size = len(context), len(embedded)
    text, own = torch.arange(n), n + torch.arange(size)
    stream = embedded
    for number, window in enumerate(windows(config)):
        prefix = f"layers.{number}."
        rows = norm(stream, weights[f"{prefix}input_layernorm.weight"])
        seen = torch.ones(size, n + size, dtype=torch.bool)
        if window is not None:
            begin = torch.full((size,), n - window) if of_speculators else own - window + 1
            seen[:, :n] = text[None] >= begin[:, None]
            if not settings.get("sliding_window_non_causal"):
                seen[:, n:] = torch.ones(size, size).tril().bool()
        read = torch.cat((context, rows))
        stream = stream + attention(weights, prefix, config, rows, read, (own, torch.cat((text, own))), seen)
        stream = mlp(weights, prefix, stream)
    return norm(stream, weights["norm.weight"])
