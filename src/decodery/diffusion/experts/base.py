"""What a way of sharing experts is: of what all rows of a canvas would take in one layer, it keeps a part for all."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from decodery.core.abstract import Contract

__all__ = ["ExpertSharing"]


@dataclass(frozen=True)
class ExpertSharing(Contract):
    """A way of sharing.

    Every row then takes its most likely experts among those that are kept, weighed as ever.

    Shared are the rows of one canvas in one pass, in each layer by themselves, so what a canvas becomes does not hang
    on others in its pass. What it saves is the reading of experts' weights, which a pass over few rows is bound by;
    `Canvas.experts` counts it.
    """

    @abstractmethod
    def core(self, said: torch.Tensor, taken: int) -> torch.Tensor:
        """[experts] bool, at least `taken` of them.

        Args:
            said: [n, experts] how likely the router finds each.
            taken: By each row.
        """
