"""Base class of expert sharing: in every layer, one subset of the experts is kept for all rows of a canvas."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from decodery.core.abstract import Contract

__all__ = ["ExpertSharing"]


@dataclass(frozen=True)
class ExpertSharing(Contract):
    """A rule that chooses the experts which all rows of a canvas share.

    Every row then takes its most likely experts among the kept ones, with the usual weights.

    The rule is applied to the rows of one canvas, in one pass and one layer. So a canvas does not depend on others in
    its pass. Sharing saves reading experts' weights, which limits the speed of a pass over few rows; `Canvas.experts`
    counts the experts that were read.
    """

    @abstractmethod
    def core(self, said: torch.Tensor, taken: int) -> torch.Tensor:
        """Choose the experts to keep.

        Args:
            said: [n, experts] router probabilities.
            taken: Number of experts that each row takes.

        Returns:
            [experts] bool, true for at least `taken` of them.
        """
