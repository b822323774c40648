"""Passes of a decoder over texts of one length side by side, with what its encoder read, with gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from decodery.models.cache.cross_memory import CrossMemory
from decodery.models.hooks import Hooks
from decodery.models.torch.encoder_decoder import EncoderDecoder, distances, run


class PaddedTexts:
    """Texts of one length side by side.

    Args:
        added: [b, 1 or heads, n, n] added to scores.
    """

    def __init__(self, count: int, added: torch.Tensor) -> None:
        self.count, self.added = count, added

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(0, (self.count, -1)).transpose(1, 2) for each in (queries, keys, values))
        found = scaled_dot_product_attention(q, k, v, attn_mask=self.added.to(q.dtype), scale=1.0)
        return found.transpose(1, 2).flatten(0, 1).flatten(1)

    def source(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """What is read of sources, which an encoder has none of."""
        raise NotImplementedError("an encoder reads no sources")


def read(model: EncoderDecoder, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's states [b * n, hidden] of sources [b, n], and the padding mask [b, 1, 1, n]."""
    config, stack = model.config, model.weights.encoder
    count, length = given.shape
    missing = torch.zeros(given.shape, dtype=torch.float32, device="cpu").masked_fill(given < 0, -torch.inf)[
        :, None, None
    ]
    places = np.arange(length)
    added = distances(stack, config, places, places)
    if config.block is not None:
        later = torch.from_numpy(places[None, :] // config.block > places[:, None] // config.block)
        added = added.masked_fill(later, -torch.inf)
    ids = given.clamp(min=0).flatten()
    states = run(stack, config, model.weights.embedding[ids], PaddedTexts(count, added + missing), Hooks.reading(()))
    return states, missing


class _WithSources(PaddedTexts):
    """Texts with the memory of their sources, and [b, 1, 1, n] what is no source."""

    def __init__(self, count: int, added: torch.Tensor, memory: CrossMemory, missing: torch.Tensor) -> None:
        super().__init__(count, added)
        self.memory, self.missing = memory, missing

    def source(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        q = queries.unflatten(0, (self.count, -1)).transpose(1, 2)
        k, v = (each.unflatten(1, (self.count, -1)).transpose(0, 1) for each in self.memory.data[layer])
        found = scaled_dot_product_attention(q, k, v, attn_mask=self.missing.to(q.dtype), scale=1.0)
        return found.transpose(1, 2).flatten(0, 1).flatten(1)


def predicted(model: EncoderDecoder, given: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Logits [b, m, vocab] after every token of texts [b, m], with sources [b, n] in view, with gradients."""
    return predicted_from(model, read(model, given), written)


def predicted_from(
    model: EncoderDecoder, source: tuple[torch.Tensor, torch.Tensor], written: torch.Tensor
) -> torch.Tensor:
    """`predicted`, of sources that have been read.

    Args:
        source: See `read`.
    """
    states, missing = source
    stack, places = model.weights.decoder, np.arange(written.shape[1])
    later = torch.from_numpy(places[None, :] > places[:, None])
    added = distances(stack, model.config, places, places).masked_fill(later, -torch.inf)
    rows = _WithSources(len(written), added[None], model.remembered(states), missing)
    hidden = run(stack, model.config, model.weights.embedding[written.flatten()], rows, Hooks.reading(()))
    return model.head(hidden).unflatten(0, tuple(written.shape))
