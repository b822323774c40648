"""What exact rules accept and what they emit instead: pure functions of probabilities, float64 [vocab] each."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch

from ..core import noise

_NOTHING = 1e-12
"""A residual of less mass is rounding: the laws are equal, and a rejection has probability zero."""


def acceptance(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """min(1, p / q) of a token that was drawn from q; 0 where p is."""
    wanted, drawn = float(p[token]), float(q[token])
    return wanted / drawn if wanted < drawn else float(wanted > 0.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)), the law of what is emitted after a rejection; p where both are equal up to rounding."""
    rest = (p - q).clamp_min_(0.0)
    mass = float(rest.sum())
    return rest.div_(mass) if mass > _NOTHING else p


def without(law: torch.Tensor, token: int) -> torch.Tensor:
    """`law` without a token, normalised; `law` itself where nothing else is in it."""
    rest = law.clone()
    rest[token] = 0.0
    mass = float(rest.sum())
    return rest.div_(mass) if mass > 0.0 else law


def sampled_law(p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[float, torch.Tensor]:
    """Acceptance probability of one child drawn from q, and the law of the token emitted instead."""
    return acceptance(p, q, token), residual(p, q)


def point_mass_law(p: torch.Tensor, tokens: Ordered[int]) -> tuple[list[float], torch.Tensor]:
    """The same for deterministic children tried in order: a conditional acceptance probability each, then the rest.

    Each child is accepted with what the remaining law gives it and taken out when it is not.
    """
    rest, accepts = p.clone(), []
    for token in tokens:
        accepts.append(float(rest[token]))
        rest[token] = 0.0
        mass = float(rest.sum())
        if mass <= _NOTHING:
            return accepts + [1.0] * (len(tokens) - len(accepts)), p
        rest /= mass
    return accepts, rest


def draw(law: torch.Tensor, seed: int, position: int) -> int:
    """A token from `law` by the request's noise for what is drawn after a rejection."""
    return int(noise.gumbel_argmax(law.log()[None], seed, [position], stream=noise.RESIDUAL)[0])
