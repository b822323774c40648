"""The tokens before each row, counted for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import Context


def histories(contexts: Sequence[Context]) -> list[np.ndarray]:
    """All tokens before each row, int64. What the rows of one tree share is converted once."""
    lists = [context.tokens for context in contexts]
    shared = _shared_length(lists)
    common = np.array(lists[0][:shared], dtype=np.int64)
    return [np.concatenate([common, np.array(tokens[shared:], dtype=np.int64)]) for tokens in lists]


def token_counts(
    contexts: Sequence[Context], vocab_size: int, *, generated_only: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [m] of the tokens that occur before any of the rows, and how often before each row: [n, m] float32.

    generated_only: leave the prompt out. Ids the model has no logit for are left out.
    """
    lists = [each.tokens[each.prompt_length :] if generated_only else each.tokens for each in contexts]
    shared = _shared_length(lists)
    common = np.array(lists[0][:shared], dtype=np.int64)
    tails = np.array([token for tokens in lists for token in tokens[shared:]], dtype=np.int64)
    rows = np.repeat(np.arange(len(lists)), [len(tokens) - shared for tokens in lists])
    rows, tails, common = rows[tails < vocab_size], tails[tails < vocab_size], common[common < vocab_size]
    ids = np.unique(np.concatenate([common, tails]))
    base = np.bincount(ids.searchsorted(common), minlength=len(ids))
    counts = np.repeat(base[None].astype(np.float32), len(lists), axis=0)
    np.add.at(counts, (rows, ids.searchsorted(tails)), 1)
    return ids, counts


def _shared_length(lists: Sequence[list[int]]) -> int:
    """How many leading tokens all lists have in common: what the first and the last in sorted order have."""
    low, high = min(lists), max(lists)
    known, end = 0, min(len(low), len(high)) + 1
    # Invariant: `known` tokens agree, `end` do not. The first guess is that the shorter list is all shared.
    guess = end - 1
    while known + 1 < end:
        if low[known:guess] == high[known:guess]:
            known = guess
        else:
            end = guess
        guess = (known + end) // 2
    return known
