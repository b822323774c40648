"""Noise without a state: every number is a hash of (seed, stream, position, token).

The noise of one token at one position does not depend on what else is asked for, in what order, by whom or on which
device, so a drafter and the target can share it, and a rejected draft consumes nothing.

The hash is SplitMix64 (Fast Splittable Pseudorandom Number Generators, 2014): seed, stream and position are mixed into a
64-bit key, which starts a sequence whose element number `token` is the hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOKEN = 0
"""Choosing the token of a position; also what sampling drafters use, so that they guess the same token."""
ACCEPT = 1
"""Accepting or rejecting a drafted token."""
RESIDUAL = 2
"""Drawing from what is left after a rejection."""
WARP = 3
"""Warps that draw."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_DIRECT = 4096
"""Up to this many candidates, computing all of them is cheaper than bounding them first."""


def mix(*words: int) -> int:
    """A 64-bit hash of integers (each modulo 2**64), for keys and for the seeds of several samples of one request."""
    state = 0
    for word in words:
        state = _finish(((state ^ word) + _STEP) & _MASK)
    return state


def draw(seed: int, position: int, token: int = 0, stream: int = ACCEPT) -> float:
    """One uniform number in (0, 1): the same as `uniform`, without the cost of tensors."""
    bits = _finish((mix(seed, stream, position) + token * _STEP) & _MASK) >> 12
    return (bits + 0.5) * 2.0**-52


def uniform(
    seed: int, position: int | Sequence[int], tokens: torch.Tensor, stream: int = TOKEN
) -> torch.Tensor:
    """Uniform numbers in (0, 1), float64, of `tokens` (int64, any shape [...]) at one position, or [n, ...] at n.

    Bit for bit the same on every device and for every subset of tokens.
    """
    return _to_unit(_bits(seed, position, tokens, stream))


def gumbel(
    seed: int, position: int | Sequence[int], tokens: torch.Tensor, stream: int = TOKEN
) -> torch.Tensor:
    """Standard Gumbel noise -log(-log u), float64, of `tokens` [...] at one position, or [n, ...] at n positions.

    The same everywhere up to the last bit of the device's logarithm.
    """
    return _to_gumbel(_bits(seed, position, tokens, stream))


def gumbel_argmax(
    log_probs: torch.Tensor, seed: int, positions: Sequence[int], stream: int = TOKEN
) -> torch.Tensor:
    """Token ids [n] int64: argmax over v of log_probs[i, v] + g(v), which is an exact draw from row i's distribution.

    log_probs: [n, V] float, normalised or not, -inf for what cannot be drawn, at least one finite entry per row.
    positions: [n], the position whose noise row i uses; equal positions share their noise.
    """
    if log_probs.device.type != "cpu":
        tokens = torch.arange(log_probs.shape[1], device=log_probs.device)
        return (log_probs.double() + gumbel(seed, positions, tokens, stream)).argmax(dim=-1)
    whole: dict[int, torch.Tensor] = {}
    chosen = []
    for row, position in zip(log_probs, positions, strict=True):
        tokens = (row > -torch.inf).nonzero().squeeze(1)
        if len(tokens) <= _DIRECT:
            scores = row[tokens].double() + gumbel(seed, position, tokens, stream)
            chosen.append(tokens[scores.argmax()])
            continue
        if position not in whole:
            whole[position] = _bits(seed, position, torch.arange(len(row)), stream)
        chosen.append(_bounded_argmax(row, tokens, whole[position]))
    return torch.stack(chosen) if chosen else log_probs.new_empty(0, dtype=torch.int64)


def _bounded_argmax(row: torch.Tensor, tokens: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The argmax of row + gumbel over `tokens`, with logarithms only of those that can win.

    Noise grows with the bits. No token gains more than the largest noise among all, so one that lies further than that
    below a score somebody reaches is out.
    """
    likely = row.argmax()
    luckiest = bits.argmax()
    most = _to_gumbel(bits[luckiest])
    reached = torch.maximum(row[likely].double() + _to_gumbel(bits[likely]), row[luckiest].double() + most)
    # The slack covers the rounding of the bound to the row's precision.
    bound = float(reached - most)
    tokens = (row >= bound - 1e-3 - 1e-5 * abs(bound)).nonzero().squeeze(1)
    scores = row[tokens].double() + _to_gumbel(bits[tokens])
    return tokens[scores.argmax()]


def _bits(seed: int, position: int | Sequence[int], tokens: torch.Tensor, stream: int) -> torch.Tensor:
    """52 random bits per token as int64: [...] for one position, [n, ...] for n."""
    if isinstance(position, int):
        return _hash(tokens * _signed(_STEP) + _signed(mix(seed, stream, position)))
    keys = [_signed(mix(seed, stream, int(each))) for each in position]
    shaped = torch.tensor(keys, dtype=torch.int64, device=tokens.device).view(-1, *[1] * tokens.dim())
    return _hash(tokens * _signed(_STEP) + shaped)


def _hash(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer, in place on int64 (products wrap around), and its upper 52 bits."""
    state ^= _shift(state, 30)
    state *= _signed(_FIRST)
    state ^= _shift(state, 27)
    state *= _signed(_SECOND)
    state ^= _shift(state, 31)
    return _shift(state, 12)


def _shift(state: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift: an arithmetic one whose copies of the sign bit are cut off."""
    shifted = state >> count
    shifted &= (1 << (64 - count)) - 1
    return shifted


def _to_unit(bits: torch.Tensor) -> torch.Tensor:
    # 52 bits and a half: with 53 the largest value would round to 1.
    return bits.double().add_(0.5).mul_(2.0**-52)


def _to_gumbel(bits: torch.Tensor) -> torch.Tensor:
    return _to_unit(bits).log_().neg_().log_().neg_()


def _finish(state: int) -> int:
    state = (state ^ (state >> 30)) * _FIRST & _MASK
    state = (state ^ (state >> 27)) * _SECOND & _MASK
    return state ^ (state >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
