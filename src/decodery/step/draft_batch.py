"""Drafts of texts that share many steps: proposed and learned together, in arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from decodery.core.abstract import Contract

from .draft_length_policy import at_rows
from .pass_prices import PassPrices

if TYPE_CHECKING:
    from decodery.models.native.array_step import ArraySteps

    from .sequence import Sequence


@dataclass(slots=True)
class JointBudget:
    """Bounds of what the texts of a step draft together.

    Attributes:
        nodes: Most drafted tokens of each text.
        texts: Those that share the pass, a new list in every step.
        context: Tokens of each, on average.
        prices: What steps take, learned from the steps themselves; None where it is given.
        given: As in `Budget.pass_seconds`, where it is given and final.
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
    """Drafts of some texts of the batch in arrays, as long as they stay in it.

    Args:
        places: The numbers of the texts in the batch.

    Attributes:
        failed: What went wrong with a text's draft in this step, by number of the text.
        rests: In how many of the next steps it neither drafts nor learns, unless texts end; the batch counts them down.
    """

    def __init__(self, places: Ordered[int]) -> None:
        self.places = places
        self.failed: dict[int, Exception] = {}
        self.rests = 0

    @abstractmethod
    def propose(self, steps: ArraySteps, budget: JointBudget) -> int:
        """Write the trees of the texts that draft in this step.

        Args:
            steps: The batch; each of its texts has its last token alone so far.
            budget: Bounds of the drafts; none is deeper than what is left of its text but one.

        Returns:
            How many tokens are drafted in all.
        """

    @abstractmethod
    def learn(self, steps: ArraySteps, ended: Ordered[int]) -> dict[int, Exception]:
        """Learn of the step, after its tokens have become text.

        Args:
            steps: The batch after the step; `kept` says how many tokens of `emitted` became text.
            ended: Texts of the batch that have ended by it.

        Returns:
            What went wrong, by number of the text.
        """

    @abstractmethod
    def leave(self) -> None:
        """The texts may be changed by others from now on: write back what is known of each."""
