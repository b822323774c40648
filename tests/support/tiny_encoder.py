"""A tiny model of an encoder and a decoder."""

from __future__ import annotations

from functools import cache

import torch

from decodery.models.families.t5 import read_weights, tensors
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery_benchmarks.training.seq2seq import Seq2SeqRecipe, random_encoder_decoder


@cache
def tiny_encoder_decoder(block: int | None = None, seed: int = 12) -> EncoderDecoder:
    """A random model in float64 whose texts hang on their sources, and some of which come to an end.

    block: of the encoder, in tokens; None for one that sees all of a source.
    """
    recipe = Seq2SeqRecipe(hidden=32, heads=4, inner=48, encoder_layers=2, decoder_layers=2, block=block, seed=seed)
    model = random_encoder_decoder(recipe, 5)
    parts = {name: tensor.double() for name, tensor in tensors(model.config, model.weights)}
    table = parts["shared.weight"]
    parts["lm_head.weight"] = torch.randn(table.shape, generator=torch.Generator().manual_seed(seed)).double()
    # Attention that looks somewhere, and texts that do not repeat their first token.
    gains = {".q.weight": 6.0, "bias.weight": 30.0, "shared.weight": 0.3}
    for name in parts:
        parts[name] = parts[name] * next((gain for end, gain in gains.items() if name.endswith(end)), 1.0)
    return EncoderDecoder(model.config, read_weights(model.config, parts.__getitem__, parts))
