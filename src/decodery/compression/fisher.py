"""How much a loss depends on the weights of each linear layer: diagonal Fisher information, by rows and columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from decodery.models.batch import Batch, Segment
from decodery.models.loaders.store import Progress, silent
from decodery.models.torch.transformer import Transformer
from decodery.models.torch.weights import Weights, floating

from .base import LINEARS, Texts
from .stream import cast, floats

_LEAST = 1e-3
"""Of the mean: what no text says anything of still counts a little."""


class Means(NamedTuple):
    """Factors of the mean squared gradients of one matrix.

    Attributes:
        rows: [out].
        columns: [in], roots of mean squared gradients, of which either has the mean 1.
        size: By which their products are to be multiplied, to come near the roots of what single weights have.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    size: float = 1.0


@torch.enable_grad()
def fisher_means(model: Transformer, texts: Texts, progress: Progress = silent) -> dict[str, Means]:
    """By linear layer, such as "layers.3.qkv": root mean squared gradients of its rows and columns.

    Gradients are those of the loss of one text after another. A copy of the model in floating point and gradients of
    all of its layers are held meanwhile.
    """
    weights = model.weights
    dtype = torch.promote_types(weights.dtype, torch.float32)
    layers = [floats(layer, dtype) for layer in weights.layers]
    learning = {
        f"layers.{index}.{name}": getattr(layer, name).weight.detach().clone().requires_grad_()
        for index, layer in enumerate(layers)
        for name in LINEARS
    }
    for index, layer in enumerate(layers):
        for name in LINEARS:
            getattr(layer, name).weight = learning[f"layers.{index}.{name}"]
    head = cast(floating(weights.head), dtype)
    clone = Transformer(model.config, Weights(weights.embedding.to(dtype), layers, weights.norm.to(dtype), head))
    rows = {name: torch.zeros(len(each), dtype=torch.float64, device="cpu") for name, each in learning.items()}
    columns = {name: torch.zeros(each.shape[1], dtype=torch.float64, device="cpu") for name, each in learning.items()}
    for number, text in enumerate(texts):
        logits = clone.forward(Batch([Segment(np.arange(len(text)), tokens=text)])).logits
        loss = cross_entropy(logits[:-1].float(), torch.as_tensor(text[1:], dtype=torch.int64, device=logits.device))
        for name, slope in zip(learning, torch.autograd.grad(loss, list(learning.values())), strict=True):
            square = slope.double().square()
            rows[name] += square.mean(dim=1).cpu()
            columns[name] += square.mean(dim=0).cpu()
        progress("reading gradients", number + 1, len(texts))
    return {name: _means(rows[name], columns[name]) for name in learning}


def _means(rows: torch.Tensor, columns: torch.Tensor) -> Means:
    """Of mean squares of rows [out] and columns [in]."""
    whole = max(float(rows.mean()) ** 0.5, 1e-150)
    roots = [each.sqrt() for each in (rows, columns)]
    means = [max(float(each.mean()), 1e-150) for each in roots]
    first, second = ((each / mean).clamp(min=_LEAST) for each, mean in zip(roots, means, strict=True))
    return Means(first, second, means[0] * means[1] / whole)
