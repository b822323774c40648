"""The entropy of next-token distributions, from which several processors compute their threshold."""

from __future__ import annotations

import numpy as np
import torch


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, float64 [n, 1], of normalised `log_probs` [n, V]; -inf entries count nothing."""
    terms = log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
    return -row_sums(terms)[:, None]


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """float64 [n] sums of `values` [n, V]; a row's sum does not depend on the other rows."""
    if values.device.type != "cpu":
        return values.sum(dim=-1, dtype=torch.float64)
    # Row by row: torch would split a single row among threads and round it differently from one of many.
    return torch.tensor([row.sum(dtype=np.float64) for row in values.numpy()], dtype=torch.float64, device="cpu")
