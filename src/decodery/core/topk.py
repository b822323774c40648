"""The most likely tokens of many rows at once: exact, and fast enough for every scored row of every pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from .errors import NumericalError
from .native.kernels import address, library

_STRIDE = 64
"""Tokens per group. Group maxima cost one sweep over the row, which is what bounds this on a CPU."""
_ROWS = 64
"""Rows sorted out together, so that a long prompt needs little memory."""
_FEW = 64
"""Up to this many, the native sweep keeps its list in order by insertion."""
_NOTHING = 1e-37
"""The kernels' exponential is not smaller, nor is that of minus infinity."""
NAN = "the model's logits hold NaN; check the weights, or load the model with dtype='float32'"


def topk(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n, k] int64 and values [n, k] of the k largest entries per row, best first.

    Among equals the lowest id comes first. `torch.topk` takes a hundred times as long on a CPU: it partitions whole
    rows, while here all but about k groups of a row are ruled out by their maxima.

    Args:
        logits: [n, vocab] float; k is cut to vocab.

    Raises:
        NumericalError: If a row holds NaN.
    """
    k = min(k, logits.shape[1])
    if logits.device.type != "cpu":
        values, best = logits.topk(k, dim=-1)
        return _from_device(best, values)
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if (found := _swept("decodery_topk", logits, k)) is not None:
        return found
    rows = logits.numpy()
    parts = [_topk(rows[start : start + _ROWS], k) for start in range(0, len(rows), _ROWS)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.empty((0, k), dtype=np.int64), np.empty((0, k), dtype=rows.dtype)
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts])


def argmax(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n] and values [n] of the largest entry of each row, the lowest id among equals.

    Logits are [n, vocab], compared as float32. The value of a row that holds NaN is NaN.
    """
    logits = logits.float()
    try:
        if (found := _swept("decodery_topk", logits, 1)) is not None:
            return found[0][:, 0], found[1][:, 0]
    except NumericalError:
        # Which of the rows it is shows below.
        pass
    # Ten times faster than PyTorch on a CPU, and it wakes no threads between two passes.
    rows = logits.cpu().numpy()
    ids = rows.argmax(axis=-1)
    return ids, rows[np.arange(len(rows)), ids]


def most_likely(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """`topk` of logits [n, vocab], with probabilities [n, k] in place of values, 0 of what is -inf."""
    if logits.device.type != "cpu":
        most, best = logits.float().topk(min(k, logits.shape[1]), dim=-1)
        return _from_device(best, (most - logits.float().logsumexp(dim=-1, keepdim=True)).exp())
    if (found := _swept("decodery_most_likely", logits, min(k, logits.shape[1]))) is not None:
        ids, chances = found
        return ids, np.where(chances > _NOTHING, chances, np.float32(0.0))
    ids, values = topk(logits, k)
    return ids, np.exp(values - logsumexp(logits, values[:, 0])[:, None])


def logsumexp(logits: torch.Tensor, largest: np.ndarray) -> np.ndarray:
    """[n] logarithm of each row's sum of exponentials.

    Args:
        largest: [n], the rows' maxima.
    """
    if logits.device.type != "cpu":
        return logits.float().logsumexp(dim=-1).cpu().numpy()
    rows = logits.numpy() if logits.dtype in (torch.float32, torch.float64) else logits.float().numpy()
    # One row at a time and one buffer for all: both stay in the processor's cache.
    scratch, sums = np.empty(rows.shape[1], dtype=rows.dtype), []
    for row, most in zip(rows, largest, strict=True):
        np.exp(np.subtract(row, most, out=scratch), out=scratch)
        sums.append(scratch.sum())
    return largest + np.log(np.array(sums, dtype=largest.dtype))


def softmax_sums(logits: torch.Tensor, row: int, token: int) -> tuple[float, float]:
    """The log-probability of a token and the entropy of its row's distribution, in nats.

    Args:
        logits: [n, vocab] float.
        row: Which of these rows it is.
        token: The token.

    Raises:
        NumericalError: If the row holds NaN.
    """
    return _sums(logits, [(row, token)])[0]


def log_probabilities(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """The log-probability of one token of each row, as `softmax_sums` has it.

    Args:
        logits: [n, vocab] float.
        tokens: [n].

    Raises:
        NumericalError: If a row holds NaN.
    """
    return [own for own, _ in _sums(logits, [*enumerate(tokens)])]


def _sums(logits: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """`softmax_sums` of rows and tokens; of many rows nothing is called but the sweep of each."""
    if (lib := library()) is None or not _fits(logits):
        return [_sums_of(logits[row], token) for row, token in places]
    first, vocab, swept = address(logits, torch.float32, None, None), logits.shape[1], lib.decodery_softmax_sums
    sums = (ctypes.c_double * (2 * len(places)))()
    into = ctypes.addressof(sums)
    for number, (row, token) in enumerate(places):
        if swept(first + 4 * row * vocab, vocab, token, into + 16 * number):
            raise NumericalError(NAN)
    return [*zip(sums[::2], sums[1::2], strict=True)]


def _sums_of(row: torch.Tensor, token: int) -> tuple[float, float]:
    """The same of a row [vocab] without a native sweep."""
    if row.device.type != "cpu":
        # Two numbers are waited for, and not the row.
        numbers = row.double()
        total, probs = numbers.logsumexp(dim=0), numbers.softmax(dim=0)
        return tuple(torch.stack((numbers[token] - total, total - probs @ numbers.clamp_min(-1e30))).tolist())
    values = row.double().numpy()
    apart = np.maximum(values - values.max(), -700.0)
    weights = np.exp(apart)
    total = weights.sum()
    if not np.isfinite(total):
        raise NumericalError(NAN)
    log = np.log(total)
    return float(values[token] - values.max() - log), float(log - weights @ apart / total)


def _fits(logits: torch.Tensor) -> bool:
    """Whether native sweeps take these rows."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.is_contiguous()


def _from_device(ids: torch.Tensor, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values [n, k] as arrays, by one copy, for each of which the host waits; float64 holds ids, too."""
    found = torch.cat((ids.double(), values.double()), dim=1).cpu().numpy()
    return found[:, : ids.shape[1]].astype(np.int64), found[:, ids.shape[1] :].astype(np.float32)


def _swept(kernel: str, logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """What a native sweep finds of the k largest of each row; None where there is none for these rows."""
    lib = library()
    if lib is None or k > _FEW or not _fits(logits):
        return None
    ids, found = np.empty((len(logits), k), dtype=np.int32), np.empty((len(logits), k), dtype=np.float32)
    if getattr(lib, kernel)(
        address(logits, torch.float32, None, None), *logits.shape, k, ids.ctypes.data, found.ctypes.data
    ):
        raise NumericalError(NAN)
    return ids.astype(np.int64), found


def _topk(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    n, vocab = rows.shape
    groups = max(vocab // _STRIDE, min(vocab, 4 * k))
    stride = vocab // groups
    whole = groups * stride
    # Token t belongs to group t % groups: the maximum then runs over contiguous memory. At least k groups reach the
    # k-th largest maximum, so no token below it is among the k best.
    maxima = rows[:, :whole].reshape(n, stride, groups).max(axis=1)
    bound = np.partition(maxima, groups - k, axis=1)[:, groups - k]
    row, group = np.nonzero(maxima >= bound[:, None])
    members = rows.reshape(-1)[(row * vocab + group)[:, None] + np.arange(0, whole, groups)]
    pair, place = np.nonzero(members >= bound[row][:, None])
    owner, ids, values = row[pair], group[pair] + place * groups, members[pair, place]
    if whole < vocab:
        last, place = np.nonzero(rows[:, whole:] >= bound[:, None])
        owner = np.concatenate((owner, last))
        ids = np.concatenate((ids, place + whole))
        values = np.concatenate((values, rows[last, place + whole]))
    if np.isnan(bound).any():
        raise NumericalError(NAN)
    order = np.lexsort((ids, -values, owner))
    best = order[np.searchsorted(owner[order], np.arange(n))[:, None] + np.arange(k)]
    return ids[best], values[best]
