"""The chi-square test of the invariants."""

from __future__ import annotations

import numpy as np
import torch


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of observed counts under probabilities; cells with expected counts below 5 are pooled.

    Args:
        counts: [k] observed counts.
        probabilities: [k] expected probabilities, summing to 1.

    Returns:
        The p-value; 0.0 where an outcome of probability zero was observed.
    """
    total = counts.sum()
    if counts[probabilities <= 0].sum() > 0:
        return 0.0
    expected = probabilities * total
    large = expected >= 5
    observed_cells = np.append(counts[large], counts[~large].sum())
    expected_cells = np.append(expected[large], expected[~large].sum())
    used = expected_cells > 0
    observed_cells, expected_cells = observed_cells[used], expected_cells[used]
    statistic = float(((observed_cells - expected_cells) ** 2 / expected_cells).sum())
    degrees = len(expected_cells) - 1
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64, device="cpu")
    return float(torch.special.gammaincc(half[0], half[1]))
