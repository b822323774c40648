"""Checkpoints in layouts that others publish: how they are written, and a decoder layer as public code runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from decodery.testing import tiny_transformer

TARGET = tiny_transformer(0, num_layers=6)
HIDDEN, INNER, HEADS, KV_HEADS = 32, 64, 4, 2
DIM = HIDDEN // HEADS
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def tensors_of(sizes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    found = {name: torch.randn(size, generator=random) / size[-1] ** 0.5 for name, size in sizes.items()}
    return {name: each + (each.ndim == 1 and "norm" in name) for name, each in found.items()}


def layer(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HIDDEN, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * DIM, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * DIM, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def frequencies(config: dict[str, Any]) -> torch.Tensor:
    """As the public code turns positions, one frequency after another."""
    own = config.get("transformer_layer_config", config)
    found = []
    for pair in range(DIM // 2):
        frequency = own.get("rope_theta", 10000.0) ** (-2 * pair / DIM)
        if scaling := own.get("rope_scaling"):
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            frequency = share * frequency + (1 - share) * frequency / scaling["factor"]
        found.append(frequency)
    return torch.tensor(found, dtype=torch.float64)


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows / (rows.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight


def run_layer(
    weights: dict[str, torch.Tensor], prefix: str, config: dict[str, Any], stream: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """A decoder layer over all items at once, heads repeated, as the public code has it."""

    def heads(name: str, count: int) -> torch.Tensor:
        rows = (attended @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(stream), count, DIM)
        return rows.transpose(0, 1)

    angles = torch.outer(torch.arange(len(stream)).double(), frequencies(config))
    cos, sin = (torch.cat((each, each), dim=-1) for each in (angles.cos(), angles.sin()))

    def turned(rows: torch.Tensor) -> torch.Tensor:
        half = torch.cat((-rows[..., DIM // 2 :], rows[..., : DIM // 2]), dim=-1)
        return rows * cos + half * sin

    queries, keys = turned(heads("q", HEADS)), turned(heads("k", KV_HEADS)).repeat_interleave(HEADS // KV_HEADS, dim=0)
    values = heads("v", KV_HEADS).repeat_interleave(HEADS // KV_HEADS, dim=0)
    scores = queries @ keys.transpose(1, 2) / DIM**0.5
    scores = scores.masked_fill(torch.ones(len(stream), len(stream)).triu(1).bool(), -torch.inf)
    context = (scores.softmax(dim=-1) @ values).transpose(0, 1).reshape(len(stream), HIDDEN)
    stream = stream + context @ weights[f"{prefix}self_attn.o_proj.weight"].T
    normed = norm(stream, weights[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (normed @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return stream + (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
