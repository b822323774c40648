"""Drafts of texts that share many steps: proposed and learned together, in arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from decodery.core.abstract import Contract

if TYPE_CHECKING:
    from decodery.models.native.array_step import ArraySteps

    from .sequence import Sequence


@dataclass(slots=True)
class JointBudget:
    """Bounds of what the texts of a step draft together.

    Attributes:
        nodes: Most drafted tokens of each text.
        texts: Those that share the pass, a new list in every step.
        drafted: Gives the times [n + 1] float64 of this step with 0, 1, 2, ... n drafted rows of all texts together.
        measured: Whether the times are learned from the steps themselves, or given and final.
        plain_known: Whether steps of so many texts without drafts were seen lately.
        sequences: How many texts these are.
    """

    nodes: int
    texts: list[Sequence]
    drafted: Callable[[int], np.ndarray]
    measured: bool = False
    plain_known: bool = True
    sequences: int = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = len(self.texts)


class DraftBatch(Contract):
    """Drafts of some texts of the batch in arrays, as long as they stay in it.

    Args:
        places: The numbers of the texts in the batch.
        failed: What went wrong with a text's draft in this step, by number of the text.
    """

    def __init__(self, places: Ordered[int]) -> None:
        self.places = places
        self.failed: dict[int, Exception] = {}

    @abstractmethod
    def propose(self, steps: ArraySteps, budget: JointBudget) -> bool:
        """Write the trees of the texts that draft in this step.

        Args:
            steps: The batch; each of its texts has its last token alone so far.
            budget: Bounds of the drafts; none is deeper than what is left of its text but one.

        Returns:
            Whether there are any.
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
