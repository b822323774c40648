"""ComnHallu: one subspace for hidden states of two sources, so that what was learned of one reads the other."""

from __future__ import annotations

import torch

from decodery.core.errors import SettingsError


def aligned(source: torch.Tensor, target: torch.Tensor, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sets of rows, [n, width] and [m, width], in one space [n, size] and [m, size], unsupervised.

    All are float64. Of either the `size` leading eigenvectors of its uncentred second moment, E_s and E_t, [width,
    size]: the source goes to S E_s (E_s^T E_t), the target to T E_t. size is this package's; the paper's code is not
    public.
    """
    if source.shape[1] != target.shape[1] or not 1 <= size <= source.shape[1]:
        raise SettingsError(
            f"rows of width {source.shape[1]} and {target.shape[1]} share no subspace of {size} dimensions: give "
            "rows of one width, and no more dimensions than that"
        )
    own, other = _leading(source.double(), size), _leading(target.double(), size)
    return source.double() @ own @ (own.T @ other), target.double() @ other


def _leading(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[width, size] eigenvectors of the second moment, the largest first."""
    return torch.linalg.eigh(rows.T @ rows / len(rows)).eigenvectors.flip(1)[:, :size]
