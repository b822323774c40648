"""A table model of few likely texts: what a wrong rule does to its law is seen after few draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decodery.testing import TableModel


class Sharp(TableModel):
    """Token t is followed by what stands in `law`, turned by t places."""

    def __init__(self, *law: float) -> None:
        super().__init__(len(law), order=1)
        self.law = torch.tensor(law, dtype=torch.float64)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.law.roll(int(tokens[-1])).log()
