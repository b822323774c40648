"""Excluding tokens, by naming those that go or those that stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from decodery.core.topk import topk


def exclude(logits: torch.Tensor, banned: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
    """`logits` [n, V] with -inf at the ids `banned[i]` of each row i.

    `logits` itself if nothing is banned. A row in which nothing else is left stays as it is: a stage before this one,
    such as a grammar, may allow only what is banned here, and then it decides.

    Args:
        logits: [n, V].
        banned: Token ids of each row.
    """
    rows = [row for row, ids in enumerate(banned) if len(ids)]
    if not rows:
        return logits
    kept = logits.clone()
    for row in rows:
        kept[row, torch.as_tensor(banned[row], dtype=torch.int64, device=logits.device)] = -torch.inf
    empty = kept.amax(dim=-1, keepdim=True) == -torch.inf
    if logits.device.type == "cpu" and not empty.any():
        return kept
    return torch.where(empty, logits, kept)


def keep(logits: torch.Tensor, kept: Iterable[np.ndarray]) -> torch.Tensor:
    """`logits` [n, V], on the CPU, at the ids that `kept` gives for each row; -inf elsewhere.

    Args:
        logits: [n, V].
        kept: Token ids of each row.
    """
    result = torch.full_like(logits, -torch.inf)
    for row, out, ids in zip(logits.numpy(), result.numpy(), kept, strict=True):
        out[ids] = row[ids]
    return result


def largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [n, k] of each row's k largest logits, best first and the lowest id among equals.

    k is cut to V. On a GPU equals come in any order, and nothing waits for the device.

    Args:
        logits: [n, V].
        k: How many of each row.
    """
    if logits.device.type != "cpu":
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return values, ids
    found, sizes = topk(logits, k)
    return torch.from_numpy(sizes), torch.from_numpy(found)
