"""What heads share whose features stand for the target's states after its final norm, and are to resemble them."""

from __future__ import annotations

import torch
from torch.nn.functional import smooth_l1_loss

from decodery.models.hooks import Tap
from decodery.models.protocol import OpenModel

from .head import Guess

LAST: Tap = -1
"""The residual stream after the last layer."""
_SPREAD, _LENGTH = 0.2, 512


def features_of(model: OpenModel, states: dict[Tap, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[n, hidden] -> [n, hidden], as the vocabulary projection sees the states after the last layer."""
    return model.final_norm(states[LAST].to(model.dtype)).to(dtype)


def disturbed(features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Features [b, n, hidden] with uniform noise, as a head's own inputs are never exact.

    The published noise falls with the length of a text. It was set for texts of 512 tokens and more: on a short text it
    would be larger than the features, and a head would learn nothing from them.

    Args:
        tokens: Any, of the same texts; what was drawn depends on them alone, so that a training goes on as it would
            have.
    """
    source = torch.Generator().manual_seed(int(tokens.sum()))
    noise = torch.rand(features.shape, generator=source, dtype=features.dtype, device="cpu") - 0.5
    return features + noise.to(features.device) * (_SPREAD * _LENGTH / max(features.shape[1], _LENGTH))


def mismatch(guesses: list[Guess], features: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Mean smooth L1 distance of predicted and target features, a scalar.

    Args:
        features: [b, n, hidden].
        known: [b, n], where something is learned.
    """
    total = features.new_zeros(())
    for step, guess in enumerate(guesses, start=1):
        rows = known[:, :-step] & known[:, step:]
        total = total + smooth_l1_loss(guess.features[:, :-step][rows], features[:, step:][rows])
    return total / len(guesses)
