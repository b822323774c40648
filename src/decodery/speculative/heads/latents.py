"""Heads whose layer attends over latents, as the next-token layers of DeepSeek-V3 and GLM-4.7-Flash do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from decodery.models.config import Latent, ModelConfig
from decodery.models.torch import latent as latents
from decodery.models.torch.weights import Layer

from .checkpoint import Tensors
from .parts import DecoderLayer, LayerShape, Parts

_SCALE = "scale"


def latent_settings(config: ModelConfig) -> dict[str, Any]:
    """The widths and the scale of attention, as a head's settings hold them."""
    assert config.latent is not None
    return asdict(config.latent) | {_SCALE: config.attention_scale}


def latent_tensors(tensors: Tensors, prefix: str, name: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    """What a layer attends with.

    Args:
        tensors: The checkpoint.
        prefix: How the layer's published names begin.
        name: How its names begin here.
        config: Of the layer.
    """
    own, hidden, heads = config.latent, config.hidden_size, config.num_heads
    assert own is not None
    wide = heads * (own.plain + own.turned)

    def take(part: str, *shape: int) -> torch.Tensor:
        published = latents.latent_name(part, "0", "weight", config)
        assert published is not None
        found = tensors.take(prefix + published.split(".layers.0.")[1], *shape)
        rows = latents.rows(part, config)
        return found if rows is None else found[rows]

    kept = take("kv", own.rank + own.turned, hidden)
    first = take("q_down", own.queries, hidden) if own.queries else take("q", wide, hidden)
    found = {
        f"{name}qkv.weight": torch.cat((first, kept)),
        f"{name}k_norm.weight": take("k_norm", own.rank),
        f"{name}heads_up.weight": take("heads_up", heads * (own.plain + own.value), own.rank),
        f"{name}output.weight": tensors.take(f"{prefix}self_attn.o_proj.weight", hidden, heads * own.value),
        f"{name}mlp_norm.weight": tensors.take(f"{prefix}post_attention_layernorm.weight", hidden),
    }
    if own.queries:
        found[f"{name}q_norm.weight"] = take("q_norm", own.queries)
        found[f"{name}q_up.weight"] = take("q_up", wide, own.queries)
    return found


class LatentLayer(DecoderLayer):
    """A decoder layer of which one row is kept for all heads, in place of keys and values.

    Args:
        latent: See `latent_settings`.
    """

    def __init__(
        self,
        parts: Parts,
        prefix: str,
        shape: LayerShape,
        experts: Mapping[str, Any] | None,
        latent: Mapping[str, Any],
    ) -> None:
        super().__init__(parts, prefix, shape, experts)
        self.scale = latent[_SCALE]
        own = Latent(**{name: value for name, value in latent.items() if name != _SCALE})
        self._config = ModelConfig(
            vocab_size=1, hidden_size=shape.hidden, intermediate_size=shape.inner, num_layers=1, num_heads=shape.heads,
            num_kv_heads=1, head_dim=shape.head_dim, max_positions=1, latent=own,
        )  # fmt: skip
        mlp = parts.linear(f"{prefix}output")
        self._layer = Layer(
            parts[f"{prefix}mlp_norm.weight"], parts.linear(f"{prefix}qkv"), mlp, parts[f"{prefix}mlp_norm.weight"],
            mlp, mlp, parts.tensors.get(f"{prefix}q_norm.weight"), parts[f"{prefix}k_norm.weight"],
            q_up=parts.linear(f"{prefix}q_up") if own.queries else None, heads_up=parts[f"{prefix}heads_up.weight"],
        )  # fmt: skip

    def heads(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, heads, rank + turned], and what is kept of each row [n, 1, rank + turned], twice."""
        cos, sin = (each[:, None].to(rows.dtype) for each in self.angles(positions.to(rows.device, non_blocking=True)))
        queries, kept = latents.queries_and_latents(self._layer, self._config, rows, cos, sin)
        return queries, kept, kept

    def output(self, rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """What attention adds to the stream: [n, hidden], of what heads found among kept rows."""
        return super().output(rows, latents.values_of(self._layer, self._config, context))
