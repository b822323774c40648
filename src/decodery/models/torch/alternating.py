"""Streams of which each layer changes one and predicts the others: Alternating Updates (2023), as in Gemma 3n."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, rms_norm

from ..config import Alternating, ModelConfig
from .mixture import rows_of
from .weights import Layer, TokenInputs

_LEAST = 1e-5
"""Of the mean square that a stream is divided by."""


def spread(own: TokenInputs, config: ModelConfig, hidden: torch.Tensor) -> torch.Tensor:
    """All streams [N, streams, hidden] of what enters the first layer, which is the first of them."""
    assert config.alternating is not None and own.stream_in is not None
    size = _size(hidden)
    made = own.stream_in(hidden).unflatten(-1, (config.alternating.streams - 1, -1))
    return torch.cat((hidden[:, None], _sized(made, size[:, None])), dim=1)


def merged(own: TokenInputs, config: ModelConfig, streams: torch.Tensor) -> torch.Tensor:
    """[N, hidden] the mean of all streams, the others turned and made as large as the first one."""
    width, first = config.hidden_size, streams[:, 0]
    assert own.stream_out is not None
    total, size = first, _size(first)
    for number in range(streams.shape[1] - 1):
        matrix = rows_of(own.stream_out, number * width, width)
        total = total + _sized(matrix(streams[:, number + 1].contiguous()), size)
    return total / streams.shape[1]


def predicted(layer: Layer, config: ModelConfig, streams: torch.Tensor) -> torch.Tensor:
    """What a layer takes the streams for before it is run."""
    shape, count = _shape(config), streams.shape[1]
    shares = linear(_routed(layer, config, streams[:, shape.active]), _weight(layer.stream_predict, streams))
    return streams + shares.unflatten(-1, (count, count)) @ streams


def corrected(layer: Layer, config: ModelConfig, streams: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """The predicted streams after the layer has made `made` of the active one."""
    shares = linear(_routed(layer, config, made), _weight(layer.stream_correct, made)) + 1.0
    return streams + shares[..., None] * (made - streams[:, _shape(config).active])[:, None]


def scaled(layer: Layer, config: ModelConfig, streams: torch.Tensor) -> torch.Tensor:
    """[N, hidden] the active stream as it meets the layer's input of the token."""
    shape = _shape(config)
    active = streams[:, shape.active]
    return active * _weight(layer.stream_scale, active) if shape.scaled else active


def _routed(layer: Layer, config: ModelConfig, rows: torch.Tensor) -> torch.Tensor:
    """[N, streams] what shares are made of."""
    normed = rms_norm(rows, rows.shape[-1:], _weight(layer.stream_norm, rows), config.norm_eps)
    return linear(normed / config.hidden_size, _weight(layer.stream_router, rows)).float().tanh().to(rows.dtype)


def _shape(config: ModelConfig) -> Alternating:
    assert config.alternating is not None
    return config.alternating


def _weight(weight: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    assert weight is not None
    return weight.to(rows.dtype)


def _size(rows: torch.Tensor) -> torch.Tensor:
    """[..., 1] root mean square."""
    return rows.square().mean(dim=-1, keepdim=True).sqrt()


def _sized(rows: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Rows with this root mean square."""
    return rows * size / rows.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST).sqrt()
