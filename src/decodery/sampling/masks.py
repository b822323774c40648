"""Functions that exclude tokens, given the excluded or the kept ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from decodery.core.topk import topk


def exclude(logits: torch.Tensor, banned: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
    """Set the logits of banned tokens to -inf.

    A row whose finite tokens are all banned is left unchanged: an earlier stage, such as a grammar, may allow only
    these tokens, and it takes precedence.

    Args:
        logits: [n, V].
        banned: Token ids to exclude, for each row.

    Returns:
        [n, V]; `logits` itself if no token is banned.
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
    """Set all logits but those of the kept tokens to -inf.

    Args:
        logits: [n, V], on the CPU.
        kept: Token ids to keep, for each row.
    """
    result = torch.full_like(logits, -torch.inf)
    for row, out, ids in zip(logits.numpy(), result.numpy(), kept, strict=True):
        out[ids] = row[ids]
    return result


def largest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [n, k] of each row's k largest logits, best first; ties in order of id.

    On a GPU ties are in any order, and the call does not synchronise with the device.

    Args:
        logits: [n, V].
        k: Number of logits per row, at most V.
    """
    if logits.device.type != "cpu":
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return values, ids
    found, sizes = topk(logits, k)
    return torch.from_numpy(sizes), torch.from_numpy(found)
