"""A pass of an encoder over sources side by side, as what learns beside it reads them."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

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
        raise NotImplementedError


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
