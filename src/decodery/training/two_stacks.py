"""Passes of an encoder and a decoder over texts of one length side by side, with gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from decodery.models.cache.cross_memory import CrossMemory
from decodery.models.hooks import Hooks
from decodery.models.torch.encoder_decoder import EncoderDecoder, distances, run


class _PaddedTexts:
    """Texts of one length side by side. seen: [b, 1 or heads, n, n] added to scores; memory: of their sources."""

    def __init__(
        self, count: int, added: torch.Tensor, memory: CrossMemory | None = None, missing: torch.Tensor | None = None
    ) -> None:
        self.count, self.added, self.memory, self.missing = count, added, memory, missing

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(0, (self.count, -1)).transpose(1, 2) for each in (queries, keys, values))
        return _joined(scaled_dot_product_attention(q, k, v, attn_mask=self.added.to(q.dtype), scale=1.0))

    def source(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        assert self.memory is not None and self.missing is not None
        q = queries.unflatten(0, (self.count, -1)).transpose(1, 2)
        k, v = (each.unflatten(1, (self.count, -1)).transpose(0, 1) for each in self.memory.data[layer])
        return _joined(scaled_dot_product_attention(q, k, v, attn_mask=self.missing.to(q.dtype), scale=1.0))


def _joined(heads: torch.Tensor) -> torch.Tensor:
    return heads.transpose(1, 2).flatten(0, 1).flatten(1)


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
    states = run(stack, config, model.weights.embedding[ids], _PaddedTexts(count, added + missing), Hooks.reading(()))
    return states, missing


def predicted(model: EncoderDecoder, given: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Logits [b, m, vocab] after every token of texts [b, m], with sources [b, n] in view, with gradients."""
    return behind(model, read(model, given), written)


def behind(model: EncoderDecoder, source: tuple[torch.Tensor, torch.Tensor], written: torch.Tensor) -> torch.Tensor:
    """`predicted`, of sources that have been read.

    Args:
        source: See `read`.
    """
    states, missing = source
    stack, places = model.weights.decoder, np.arange(written.shape[1])
    later = torch.from_numpy(places[None, :] > places[:, None])
    added = distances(stack, model.config, places, places).masked_fill(later, -torch.inf)
    rows = _PaddedTexts(len(written), added[None], model.remembered(states), missing)
    hidden = run(stack, model.config, model.weights.embedding[written.flatten()], rows, Hooks.reading(()))
    return model.head(hidden).unflatten(0, tuple(written.shape))
