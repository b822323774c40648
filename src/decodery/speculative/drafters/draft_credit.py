"""What drafts of a text may lose: a little at first, then what they have earned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

_FIRST, SHARE = 0.5, 0.004
"""In units of a step without drafts: what drafts of a new text may lose, and what each later step adds."""
_TOGETHER = 0.3
"""By how much less texts that share their steps may lose: a step of theirs takes the time of several texts."""


@dataclass(slots=True)
class DraftCredit:
    """Bounds what drafts cost a text where they never help.

    Attributes:
        balance: What they may still lose, in units of a step without drafts.
    """

    balance: float = _FIRST

    @classmethod
    def shared(cls, credits: Iterable[DraftCredit]) -> DraftCredit:
        """The credit of texts that share their steps."""
        balances = [each.balance for each in credits]
        return cls(fmean(balances) - _TOGETHER * (len(balances) > 1))

    def step(self) -> None:
        """A step begins."""
        self.balance += SHARE

    def affords(self, costs: np.ndarray) -> int:
        """How many tokens may be drafted in this step.

        Args:
            costs: [n + 1] seconds of the step with 0, 1, 2, ... drafted tokens, never falling.
        """
        return max(int(np.searchsorted(costs, costs[0] * (1.0 + self.balance), "right")) - 1, 0)

    def settle(self, gained: float, spent: float) -> None:
        """A step with drafts has ended.

        Args:
            gained: Drafted tokens that became text, of each text on average.
            spent: What the step took beyond one without drafts, in units of that.
        """
        self.balance += gained - spent
