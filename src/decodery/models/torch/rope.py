"""Rotary position embedding (RoFormer, 2021) and the ways it is stretched for long contexts."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from ..config import ModelConfig, Rope


def stretched(config: ModelConfig) -> str | None:
    """A sentence about a context that is longer than what was trained before its rotations were stretched.

    Else None. Scaling by yarn and llama3 notes that length in the model's files; linear scaling and factors do not.
    """
    rope = config.rope
    if rope.kind in ("linear", "factors") and not rope.original_max_positions:
        known = "a length that its files do not name" if max(rope.factor, *rope.factors, 1.0) > 1 else ""
    else:
        original = rope.original_max_positions
        known = f"{original} tokens" if 0 < original < config.max_positions else ""
    if not known:
        return None
    return f"its context of {config.max_positions} tokens is stretched from {known} by RoPE scaling of kind {rope.kind}"


def rope_table(rope: Rope, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0..positions-1, each [positions, head_dim / 2] float32.

    Rotation pairs dimension i with i + head_dim / 2. Yarn's attention factor is multiplied in.
    """
    return rope_angles(rope, head_dim, torch.arange(positions, dtype=torch.float32, device="cpu"))


def rope_angles(rope: Rope, head_dim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each [n, head_dim / 2] float32, for positions [n].

    They are computed in the precision of the positions.
    """
    factor = rope_frequencies(rope, rope.rotated or head_dim)[1]
    angles = positions[:, None] * turns(rope, head_dim)[None, :].to(positions.dtype)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        # What is not turned is not made larger either.
        pairs = (rope.rotated or head_dim) // 2
        cos[:, :pairs] *= factor
        sin[:, :pairs] *= factor
    return cos.float(), sin.float()


def turns(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angular frequency of every pair [head_dim / 2] in radians per position, 0 if not rotated."""
    inverse = rope_frequencies(rope, rope.rotated or head_dim)[0]
    return pad(inverse, (0, head_dim // 2 - len(inverse)))


def head_order(dim: int, turned: int, *, paired: bool) -> torch.Tensor:
    """[dim] the dimension of a head elsewhere that stands at each place here.

    Args:
        turned: How many of the first dimensions are turned.
        paired: Neighbours are turned together, not the halves of these.
    """
    pairs = torch.arange(turned, device="cpu").view((-1, 2) if paired else (2, -1))
    both = pairs if paired else pairs.T
    still = torch.arange(turned, dim, device="cpu").view(2, -1)
    return torch.cat((both[:, 0], still[0], both[:, 1], still[1]))


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angular frequency of every pair [head_dim / 2] in radians per position, and a factor.

    The factor is for cosines and sines.

    Args:
        head_dim: The dimensions that are turned.
    """
    if rope.kind == "none":
        return torch.zeros(head_dim // 2, dtype=torch.float32, device="cpu"), 1.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "factors":
        factors = torch.tensor(rope.factors, dtype=torch.float32, device="cpu")
        return inverse / factors, 1.0 if rope.attention_factor is None else rope.attention_factor
    if rope.kind == "proportional":
        still = torch.arange(head_dim // 2, device="cpu") >= int(rope.share * head_dim // 2)
        return (inverse / rope.factor).masked_fill(still, 0.0), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse, 1.0


def _llama3(rope: Rope, inverse: torch.Tensor) -> torch.Tensor:
    turns = rope.original_max_positions * inverse / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    # Between equal factors, as Llama 4 Scout's, there is nothing to blend.
    blend = smooth.clamp(0.0, 1.0)
    if rope.low_freq_factor == rope.high_freq_factor:
        blend = (turns > rope.high_freq_factor).to(inverse.dtype)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _yarn(rope: Rope, inverse: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    def dimension(turns: float) -> float:
        """The (fractional) pair that makes `turns` full turns over the original context."""
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    blended = inverse / rope.factor * stretched + inverse * (1 - stretched)

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return blended, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return blended, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return blended, magnitude(1.0)
