"""What drafts of a text may lose: a little at first, then what they have earned."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import ceil

import numpy as np

_FIRST, SHARE = 0.9, 0.004
"""In units of a step without drafts: what drafts of a new text may lose, and what each later step adds."""
_TOGETHER = 0.9
"""By how much less texts that share their steps may lose: a step of theirs takes the time of several texts."""
AHEAD, EXPOSED = 8.0, 0.15
"""Tokens in the lead from which on those of a text are worth their rows alone, and what may be lost of what leads are
worth: it is earned only when the slowest text catches up."""
LONGEST = 64
"""Steps that pass at most before it is computed again whether a draft is affordable."""


@dataclass(slots=True)
class DraftCredit:
    """Bounds what drafts cost a text where they never help.

    Attributes:
        balance: What they may still lose, in units of a step without drafts.
        lead: Drafted tokens that became text, beyond those of the slowest text of its steps.
    """

    balance: float = _FIRST
    lead: float = 0.0


class JointCredit:
    """The credit of texts that share their steps: the lowest, as each text waits for all drafts.

    A step of several texts has a part that is as long for one text as for all, and a row of each. Where a text ends
    earlier, its rows are saved. The rest is saved as soon as every text has saved a step. So neither the slowest text
    nor all texts together lose more than the credit.

    Args:
        credits: Of the texts that draft.
        sequences: How many texts share the steps.
    """

    def __init__(self, credits: Ordered[DraftCredit], sequences: int) -> None:
        self._credits, self._sequences = credits, sequences
        self.balance = min(each.balance for each in credits) - _TOGETHER * (sequences > 1)
        self._leads = np.array([each.lead for each in credits])

    def affords(self, costs: np.ndarray) -> int:
        """How many tokens may be drafted in this step.

        Args:
            costs: [n + 1] seconds of the step with 0, 1, 2, ... drafted tokens, never falling.
        """
        return max(int(np.searchsorted(costs, costs[0] * (1.0 + self._allowance(costs)), "right")) - 1, 0)

    def waits(self, costs: np.ndarray) -> int:
        """How many steps pass before any draft is affordable."""
        missing = costs[1] / costs[0] - 1.0 - self._allowance(costs) if len(costs) > 1 else 0.0
        return min(ceil(max(missing, 0.0) / max(SHARE, 1e-9)), LONGEST)

    def weights(self, costs: np.ndarray) -> np.ndarray:
        """[n] what a token of each text is worth: of one that is far ahead of the slowest only its row."""
        row = max(self._sequences * self._row(costs, 1), 1e-3) if len(costs) > 1 else 1.0
        return np.where(self._leads < AHEAD, 1.0, row)

    def step(self) -> None:
        """A step begins."""
        self.pay(-SHARE)

    def pay(self, part: float) -> None:
        """Something else was done for drafts, which took this part of a step without any."""
        for each in self._credits:
            each.balance -= part

    def settle(self, accepted: Ordered[int], costs: np.ndarray) -> None:
        """A step with drafts has ended.

        Args:
            accepted: [n] drafted tokens of each text that became text.
            costs: [drafted + 1] seconds of the step with 0, 1, 2, ... drafted tokens, up to those that were drafted.
        """
        row, spent = self._row(costs, len(costs) - 1), costs[-1] / costs[0] - 1.0
        self._leads += accepted
        common = float(self._leads.min()) if len(self._credits) == self._sequences else 0.0
        self._leads -= common
        earned = row * sum(accepted) + (1.0 - self._sequences * row) * common
        self.pay(spent - earned)
        for each, lead in zip(self._credits, self._leads.tolist(), strict=True):
            each.lead = lead

    def _allowance(self, costs: np.ndarray) -> float:
        row = self._row(costs, 1) if len(costs) > 1 else 0.0
        return self.balance + min((1.0 - self._sequences * row) * float(self._leads.mean()), EXPOSED)

    def _row(self, costs: np.ndarray, drafted: int) -> float:
        """What one of the drafted rows takes; never more than the row of a text."""
        return float(min((costs[drafted] / costs[0] - 1.0) / drafted, 1.0 / self._sequences))
