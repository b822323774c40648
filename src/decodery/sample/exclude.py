"""Excluding tokens without ever excluding all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def exclude(logits: torch.Tensor, banned: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
    """`logits` [n, V] with -inf at the ids `banned[i]` of each row i; `logits` itself if nothing is banned.

    A row in which nothing else is left stays as it is: a stage before this one, such as a grammar, may allow
    only what is banned here, and then it decides.
    """
    rows = [row for row, ids in enumerate(banned) if len(ids)]
    if not rows:
        return logits
    kept = logits.clone()
    for row in rows:
        kept[row, torch.as_tensor(banned[row], device=logits.device)] = -torch.inf
    where = torch.tensor(rows, device=logits.device)
    empty = kept[where].amax(dim=-1, keepdim=True) == -torch.inf
    kept[where] = torch.where(empty, logits[where], kept[where])
    return kept
