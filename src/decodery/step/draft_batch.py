"""Drafts of texts that share many steps, proposed together in arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from decodery.core.abstract import Contract
from decodery.models.step_arrays import StepArrays

from .draft_length_policy import at_rows
from .pass_prices import PassPrices
from .sequence import Sequence


@dataclass(slots=True)
class JointBudget:
    """Bounds of the drafts of all texts of a step.

    Attributes:
        nodes: Maximum number of drafted tokens of each text.
        texts: Texts that share the pass, a new list in every step.
        context: Average number of tokens in the cache of a text.
        prices: Times of steps, learned from the steps themselves; None where `given` is set.
        given: As in `Budget.pass_seconds`, where the times are given and final.
    """

    nodes: int
    texts: list[Sequence]
    context: float
    prices: PassPrices | None
    given: Callable[[int], np.ndarray] | None = None

    def drafted(self, rows: int) -> np.ndarray:
        """Seconds [rows + 1] of this step with 0, 1, 2, ... drafted rows of all texts together."""
        count = len(self.texts)
        if self.prices is not None:
            return self.prices.seconds(count, self.context, rows)
        assert self.given is not None
        return at_rows(self.given(int(self.context)), count + np.arange(rows + 1))


class DraftBatch(Contract):
    """Drafts of some texts of the batch, in arrays, while they stay in it.

    Args:
        places: The indices of the texts in the batch.

    Attributes:
        failed: Errors of drafts in this step, by index of the text.
        rests: Number of next steps that it skips unless a text ends; the batch counts them down.
    """

    def __init__(self, places: Ordered[int]) -> None:
        self.places = places
        self.failed: dict[int, Exception] = {}
        self.rests = 0

    @abstractmethod
    def propose(self, steps: StepArrays, budget: JointBudget) -> int:
        """Write the trees of the texts that draft in this step.

        Args:
            steps: The batch; so far the tree of each text is its last token.
            budget: Bounds of the drafts; the depth of a draft is less than the number of tokens left to its text.

        Returns:
            Total number of drafted tokens.
        """

    @abstractmethod
    def learn(self, steps: StepArrays, ended: Ordered[int]) -> dict[int, Exception]:
        """Update the drafters after the step, when its tokens have become text.

        Args:
            steps: The batch after the step; `kept` is the number of tokens of `emitted` that became text.
            ended: Texts of the batch that ended in this step.

        Returns:
            Errors, by index of the text.
        """

    @property
    def asks(self) -> bool:
        """Whether a text's next draft needs what steps in arrays do not have, see `Drafter.asks`."""
        return False

    @abstractmethod
    def leave(self) -> None:
        """Write the state of each text back, because it leaves the batch."""
