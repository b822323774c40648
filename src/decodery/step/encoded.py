"""What an encoder has read for a text: asked for once, when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decodery.models.cache.cache import KVCache
from decodery.models.cache.cross_memory import CrossMemory
from decodery.models.torch.encoder_decoder import EncoderDecoder

from .forward_request import ForwardCoroutine, ForwardRequest

ENCODER = "encoder"
"""What the encoder's passes go by in ledgers."""


def encoded(model: EncoderDecoder, source: Sequence[int], cache: KVCache) -> ForwardCoroutine[CrossMemory]:
    """What a text remembers of its source, which is read where its cache does not hold that yet."""
    if cache.memory is None:
        encoder = model.encoder
        (read,) = yield [ForwardRequest(encoder, encoder.segment(source), (-1,), ENCODER)]
        with torch.no_grad():
            cache.memory = model.remembered(read.hidden[-1])
    return cache.memory
