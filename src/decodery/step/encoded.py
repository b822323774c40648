"""The output of an encoder for a text, computed once, when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decodery.models.cache.cache import KVCache
from decodery.models.cache.cross_memory import CrossMemory
from decodery.models.torch.encoder_decoder import EncoderDecoder

from .forward_request import ForwardCoroutine, ForwardRequest

ENCODER = "encoder"
"""Name of the encoder's passes in the ledger."""


def encoded(model: EncoderDecoder, source: Sequence[int], cache: KVCache) -> ForwardCoroutine[CrossMemory]:
    """The cross-attention memory of a text's source, computed where the cache does not have it."""
    if cache.memory is None:
        encoder = model.encoder
        (read,) = yield [ForwardRequest(encoder, encoder.segment(source), (-1,), ENCODER)]
        with torch.no_grad():
            cache.memory = model.remembered(read.hidden[-1])
    return cache.memory
