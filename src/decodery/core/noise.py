"""Noise without a state: every number is a hash of (seed, stream, position, token).

The noise of one token at one position does not depend on what else is asked for, in what order, by whom or on
which device, so a drafter and the target can share it, and a rejected draft consumes nothing.

The hash is SplitMix64 (Fast Splittable Pseudorandom Number Generators, 2014): seed, stream and position are
mixed into a 64-bit key, which starts a sequence whose element number `token` is the hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch

from .native.kernels import address, library

A = TypeVar("A", np.ndarray, torch.Tensor)

TOKEN = 0
"""Choosing the token of a position; also what sampling drafters use, so that they guess the same token."""
ACCEPT = 1
"""Accepting or rejecting a drafted token."""
RESIDUAL = 2
"""Drawing from what is left after a rejection."""
WARP = 3
"""Warps that draw."""
GUESS = 4
"""Drafters that guess blindly."""
COUPLE = 5
"""Choosing among the tokens that a hidden message leaves open."""
DRAFT = 6
"""Drafters that draw apart from the token's own noise, so that no two nodes of a tree share any."""
REPEAT = 7
"""Draws with replacement among tokens that were tried before."""
PARTICLE = 8
"""Seeds of texts that part from each other."""
RESAMPLE = 9
"""Which texts a population keeps."""

PLACE = 10
"""In which order places of a canvas are filled."""
PASS = 11
"""Proposals of one pass over a canvas, where each pass draws anew."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MOST = 36.8
"""More than the Gumbel noise of the largest 52 bits."""
_NEAR = 4.0
"""How far below the top, in nats, tokens are tried first."""
_DIRECT = 4096
"""Up to this many candidates, hashing them costs less than bounding them by the noise of all tokens."""
_TIES = 8
"""Tokens at most between which a native sweep leaves the choice; of more there are ties without noise."""


def mix(*words: int) -> int:
    """A 64-bit hash of integers, each modulo 2**64."""
    state = 0
    for word in words:
        state = _finish(((state ^ word) + _STEP) & _MASK)
    return state


def nth_seed(seed: int, number: int) -> int:
    """The seed of text `number` of several; they count up from `seed` modulo 2**64."""
    return (seed + number) & _MASK


def draw(seed: int, position: int, token: int = 0, stream: int = ACCEPT) -> float:
    """One uniform number in (0, 1): the same as `uniform`, without the cost of tensors."""
    bits = _finish((mix(seed, stream, position) + token * _STEP) & _MASK) >> 12
    return (bits + 0.5) * 2.0**-52


def uniform(seed: int, position: int | Sequence[int], tokens: torch.Tensor, stream: int = TOKEN) -> torch.Tensor:
    """Uniform float64 numbers in (0, 1) for tokens at one or n positions.

    [m, ...] for `tokens` [m, ...] at one position, [n, m, ...] at n. Bit for bit the same on every device and for every
    subset of tokens.

    Args:
        tokens: int64.
    """
    if tokens.device.type == "cpu":
        return torch.from_numpy(_unit(_bits(seed, position, tokens.numpy(), stream)))
    return (_bits(seed, position, tokens, stream).double() + 0.5) * 2.0**-52


def gumbel(seed: int, position: int | Sequence[int], tokens: torch.Tensor, stream: int = TOKEN) -> torch.Tensor:
    """Standard Gumbel noise -log(-log u), float64, for tokens at one or n positions.

    [m, ...] for `tokens` at one position, [n, m, ...] at n. The same for every subset of tokens, and on every device up
    to the last bit of its logarithm.
    """
    if tokens.device.type == "cpu":
        return torch.from_numpy(_gumbel(_bits(seed, position, tokens.numpy(), stream)))
    return uniform(seed, position, tokens, stream).log_().neg_().log_().neg_()


def keys(seeds: np.ndarray, positions: np.ndarray, stream: int = TOKEN) -> np.ndarray:
    """[n] int64 that decide the noise of rows with seeds and positions of their own.

    Args:
        seeds: [n] uint64.
        positions: [n] int64.
        stream: What the noise is for.
    """
    return mixed(mixed(mixed(0, seeds.view(np.int64)), stream), positions)


def mixed(state: A | int, word: A | int) -> A:
    """What `mix` makes of words whose hash is `state` and one more, for many of them, bit for bit.

    Args:
        state: [n] int64, or one for all; 0 where the word is the first.
        word: [n] int64, or one for all.
    """
    hashed: Any = (word ^ state) + signed(_STEP)
    for count, factor in ((30, _FIRST), (27, _SECOND)):
        hashed ^= _shift(hashed, count)
        hashed *= signed(factor)
    hashed ^= _shift(hashed, 31)
    return cast(A, hashed)


def keyed(log_probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Rows [n, V] plus the noise of their own, float64, without waiting for their device.

    Args:
        log_probs: [n, V] float.
        keys: [n] int64 on the same device, see `keys`.
    """
    tokens = torch.arange(log_probs.shape[1], device=log_probs.device) * signed(_STEP)
    uniforms = _hash(tokens + keys[:, None]).double().add_(0.5).mul_(2.0**-52)
    return uniforms.log_().neg_().log_().neg_().add_(log_probs)


def keyed_argmax(log_probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`gumbel_argmax` of rows with noise of their own, without waiting for their device.

    Args:
        log_probs: [n, V] float.
        keys: [n] int64 on the same device, see `keys`.

    Returns:
        [n] int64.
    """
    return keyed(log_probs, keys).argmax(dim=-1)


def gumbel_argmax(log_probs: torch.Tensor, seed: int, positions: Sequence[int], stream: int = TOKEN) -> torch.Tensor:
    """Token ids [n] int64: argmax over v of log_probs[i, v] + g(v).

    It is an exact draw from row i's distribution.

    Args:
        log_probs: [n, V] float, normalised or not, -inf for what cannot be drawn, at least one finite entry per row.
        positions: [n], the position whose noise row i uses; equal positions share their noise.
    """
    if log_probs.device.type != "cpu":
        tokens = torch.arange(log_probs.shape[1], device=log_probs.device)
        return (log_probs.double() + gumbel(seed, positions, tokens, stream)).argmax(dim=-1)
    whole: dict[int, np.ndarray] = {}
    rows = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
    chosen = [
        _bounded_argmax(row, seed, int(position), stream, whole)
        for row, position in zip(rows.numpy(), positions, strict=True)
    ]
    return torch.tensor(chosen, dtype=torch.int64, device="cpu")


def gumbel_topk(
    log_probs: torch.Tensor, k: int, seed: int, positions: Sequence[int], stream: int = TOKEN
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and scores [n, k] (int64, float64) of the k largest log_probs[i, v] + g(v), the largest first.

    In this order they are k draws without replacement from row i's distribution (Gumbel-top-k). Where a row has fewer
    tokens to draw, ids are -1 and scores -inf.

    Args:
        log_probs, positions: As in `gumbel_argmax`; k is cut to V.
    """
    n, vocab = log_probs.shape
    k = min(k, vocab)
    if log_probs.device.type != "cpu":
        noise = gumbel(seed, positions, torch.arange(vocab, device=log_probs.device), stream)
        values, found = (log_probs.double() + noise).topk(k, dim=-1)
        scores, ids = values.cpu().numpy(), found.cpu().numpy()
        return np.where(np.isfinite(scores), ids, -1), scores
    ids, scores = np.full((n, k), -1, dtype=np.int64), np.full((n, k), -np.inf)
    whole: dict[int, np.ndarray] = {}
    rows = log_probs if log_probs.dtype == torch.float64 else log_probs.float()
    for number, (row, position) in enumerate(zip(rows.numpy(), positions, strict=True)):
        tokens, reached = _bounded_topk(row, k, seed, int(position), stream, whole)
        ids[number, : len(tokens)], scores[number, : len(tokens)] = tokens, reached
    return ids, scores


def _bounded_topk(
    row: np.ndarray, k: int, seed: int, position: int, stream: int, whole: dict[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Up to k tokens and their scores, best first; bounded like `_bounded_argmax`, by the k-th of the tokens near."""
    tokens = np.flatnonzero(row > -np.inf)
    if len(tokens) > max(_DIRECT, 4 * k):
        top, reach = row.max(), _NEAR
        while len(near := np.flatnonzero(row >= top - reach)) < k:
            reach *= 2
        scores = row[near] + _gumbel(_bits(seed, position, near, stream))
        reached = float(np.partition(scores, len(scores) - k)[len(scores) - k])
        if position not in whole:
            whole[position] = _bits(seed, position, np.arange(len(row)), stream)
        tokens = _at_least(row, reached - float(_gumbel(whole[position].max())))
        scores = row[tokens] + _gumbel(whole[position][tokens])
    else:
        scores = row[tokens] + _gumbel(_bits(seed, position, tokens, stream))
    best = np.argsort(-scores, kind="stable")[:k]
    return tokens[best], scores[best]


def _bounded_argmax(row: np.ndarray, seed: int, position: int, stream: int, whole: dict[int, np.ndarray]) -> int:
    """The argmax of row + gumbel: by a native sweep over the row where there is one, see `_swept_argmax`."""
    tokens = _raced(row, seed, position, stream)
    if tokens is None:
        return _swept_argmax(row, seed, position, stream, whole)
    if len(tokens) == 1:
        return int(tokens[0])
    # Nearer to each other than libraries' logarithms: ours decide, as they do where nothing is native.
    return int(tokens[(row[tokens] + _gumbel(_bits(seed, position, tokens, stream))).argmax()])


def _raced(row: np.ndarray, seed: int, position: int, stream: int) -> np.ndarray | None:
    """The tokens, ascending, of which one has the largest row + gumbel; None where no native sweep tells."""
    lib = library()
    if lib is None or row.dtype != np.float32 or not row.flags.c_contiguous:
        return None
    ids = np.empty(_TIES, dtype=np.int32)
    found = lib.decodery_race(
        address(row, np.float32, None), len(row), mix(seed, stream, position), _TIES, ids.ctypes.data
    )
    return ids[:found].astype(np.int64) if found > 0 else None


def _swept_argmax(row: np.ndarray, seed: int, position: int, stream: int, whole: dict[int, np.ndarray]) -> int:
    """The argmax of row + gumbel, with noise only where it can win. whole: bits of all tokens, by position.

    The tokens near the top reach some score. No noise exceeds `_MOST`, nor that of the largest bits among all
    tokens, so whatever lies further than that below the score is out. This is done in numpy, whose short
    operations on one thread cost less than waking several.
    """
    near = np.flatnonzero(row >= row.max() - _NEAR)
    reached = float((row[near] + _gumbel(_bits(seed, position, near, stream))).max())
    tokens = _at_least(row, reached - _MOST)
    if len(tokens) <= _DIRECT:
        bits = _bits(seed, position, tokens, stream)
    else:
        if position not in whole:
            whole[position] = _bits(seed, position, np.arange(len(row)), stream)
        tokens = _at_least(row, reached - float(_gumbel(whole[position].max())))
        bits = whole[position][tokens]
    return int(tokens[(row[tokens] + _gumbel(bits)).argmax()])


def _at_least(row: np.ndarray, bound: float) -> np.ndarray:
    """Indices of `row` from `bound` up, and a little below: the comparison rounds to the row's precision."""
    return np.flatnonzero(row >= bound - 1e-3 - 1e-5 * abs(bound))


def _bits(seed: int, position: int | Sequence[int], tokens: A, stream: int) -> A:
    """52 random bits per token, int64: [m, ...] for one position, [n, m, ...] for n; products wrap around."""
    if isinstance(position, int):
        return _hash(tokens * signed(_STEP) + signed(mix(seed, stream, position)))
    spread = tokens * signed(_STEP)
    keys = np.array([signed(mix(seed, stream, int(each))) for each in position], dtype=np.int64)
    shaped = keys.reshape(-1, *[1] * tokens.ndim)
    if isinstance(spread, np.ndarray):
        return _hash(spread + shaped)
    return _hash(spread + torch.from_numpy(shaped).to(spread.device, non_blocking=True))


def _hash(state: A) -> A:
    """SplitMix64's finalizer, in place on int64, and its upper 52 bits."""
    state ^= _shift(state, 30)
    state *= signed(_FIRST)
    state ^= _shift(state, 27)
    state *= signed(_SECOND)
    state ^= _shift(state, 31)
    return _shift(state, 12)


def _shift(state: A, count: int) -> A:
    """Logical right shift: an arithmetic one whose copies of the sign bit are cut off."""
    shifted = state >> count
    shifted &= (1 << (64 - count)) - 1
    return shifted


def _unit(bits: np.ndarray) -> np.ndarray:
    # 52 bits and a half: with 53 the largest value would round to 1.
    return (bits + 0.5) * 2.0**-52


def _gumbel(bits: np.ndarray) -> np.ndarray:
    return -np.log(-np.log(_unit(bits)))


def _finish(state: int) -> int:
    state = (state ^ (state >> 30)) * _FIRST & _MASK
    state = (state ^ (state >> 27)) * _SECOND & _MASK
    return state ^ (state >> 31)


def signed(word: int) -> int:
    """A 64-bit hash as the int64 of its bits."""
    return word - (1 << 64) if word >> 63 else word
