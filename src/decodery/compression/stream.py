"""Calibration texts on their way through a model, one layer at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import rms_norm

from decodery.models.batch import Batch, Segment
from decodery.models.layer_plan import LayerPlan
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Dense, Layer, Linear, Weights, floating

_ROWS = 2048
"""Rows that are in a layer at a time."""


class Gram:
    """A linear layer that notes what it is given.

    Args:
        total: [in, in] float64, the sum of x^T x over all rows.
    """

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.total: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        part = (rows.T @ rows).double()
        self.total = part if self.total is None else self.total + part
        return self.linear(rows)


class Stream:
    """Texts between two layers of a model.

    Args:
        rows: [n, hidden] of all texts, float32 (float64 of a float64 model).
    """

    def __init__(self, model: Transformer, texts: list[np.ndarray]) -> None:
        self.model = model
        self.texts = texts
        self.dtype = torch.promote_types(model.weights.dtype, torch.float32)
        ids = torch.from_numpy(np.concatenate(texts)).to(model.device)
        self.rows = model.embed_tokens(ids).to(self.dtype)

    @torch.no_grad()
    def through(self, index: int, layer: Layer, skip: str | None = None, eps: float | None = None) -> torch.Tensor:
        """[n, width] what `layer`, in place of the model's, makes of the rows, which stay as they are.

        Args:
            skip: The sublayer that is left out, "attention" or "mlp".
            eps: Of norms, where the layer has its own.
        """
        config = self.model.config
        layer_plan = LayerPlan((index,), frozenset() if skip is None else frozenset((f"{skip}.{index}",)))
        layers = [layer] * config.num_layers
        nothing = torch.empty(0, dtype=self.dtype, device=self.model.device)
        alone = Transformer(
            replace(config, norm_eps=config.norm_eps if eps is None else eps, shortcuts=True),
            Weights(nothing, layers, nothing, Dense(nothing[:, None])),
        )
        results, first = [], 0
        for group in _groups(self.texts):
            segments = []
            for text in group:
                states = self.rows[first : first + len(text)]
                segments.append(Segment(np.arange(len(text)), states=states))
                first += len(text)
            batch = Batch(segments)
            results.append(alone.layers(torch.cat([each.states for each in segments]), batch, None, layer_plan))  # type: ignore[misc]
        return torch.cat(results)

    def entering(self, index: int, layer: Layer) -> torch.Tensor:
        """[n, hidden] the normed rows that enter the MLP of `layer`, in place of the model's."""
        behind = self.through(index, layer, skip="mlp")
        return rms_norm(behind, behind.shape[-1:], layer.mlp_norm, self.model.config.norm_eps)


def _groups(texts: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Whole texts, of about so many rows together."""
    groups: list[list[np.ndarray]] = [[]]
    for text in texts:
        if groups[-1] and sum(map(len, groups[-1])) + len(text) > _ROWS:
            groups.append([])
        groups[-1].append(text)
    return groups


def floats(layer: Layer, dtype: torch.dtype) -> Layer:
    """A copy of a layer in floating point; norms are not narrowed."""
    parts: dict[str, Any] = {}
    for name, part in vars(layer).items():
        if isinstance(part, torch.Tensor):
            parts[name] = part.to(torch.promote_types(part.dtype, dtype) if name.endswith("norm") else dtype)
        elif part is not None:
            parts[name] = cast(floating(part), dtype)
    return Layer(**parts)


def cast(dense: Dense, dtype: torch.dtype) -> Dense:
    """The same linear layer in another floating point type."""
    return Dense(dense.weight.to(dtype), None if dense.bias is None else dense.bias.to(dtype))
