"""The entropy of next-token distributions, which several warps set their threshold by."""

from __future__ import annotations

import numpy as np
import torch


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, float64 [n, 1], of normalised `log_probs` [n, V]; -inf entries count nothing."""
    terms = log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)
    if terms.device.type != "cpu":
        return -terms.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # Row by row: torch would split a single row among threads and round it differently from one of many.
    sums = [[-row.sum(dtype=np.float64)] for row in terms.numpy()]
    return torch.tensor(sums, dtype=torch.float64).view(-1, 1)
