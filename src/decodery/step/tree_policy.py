"""What a tree policy is: it decides which nodes of a draft tree are expanded, and what becomes of the guesses."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodery.core.abstract import Contract
from decodery.core.requirements import Provides, Requirements

from .draft_tree import DraftTree, Origin
from .forward_request import ForwardCoroutine

if TYPE_CHECKING:
    from .draft_length_policy import Budget
    from .sequence import Sequence
    from .tree_drafter import TreeDrafter

__all__ = ["TreePolicy"]


@dataclass(frozen=True)
class TreePolicy(Contract):
    """A way of growing trees with any drafter that can expand.

    Fields are hyper-parameters; nothing is remembered.

    What sampled policies draw from, and in which order, is verified as drawn. So the number of a node's children may
    depend on all that was drawn before, never on the token about to be drawn, and a drawn node stays in the tree.
    """

    @property
    def requirements(self) -> Requirements:
        return Requirements()

    @property
    def provides(self) -> Provides:
        """How siblings arise: one kind of `drafts`."""
        return Provides(drafts=("deterministic",))

    @property
    def origin(self) -> Origin:
        """The origin of its trees, see `DraftTree`."""
        (only,) = self.provides.drafts
        return only

    def largest(self) -> int | None:
        """How many nodes a tree of its has at most, by its settings; None where they set no bound."""
        return None

    @abstractmethod
    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        """A tree rooted at the last token, within the budget (`nodes` and `depth` at least 1).

        Args:
            expander: A drafter that gives distributions after any node.
            seq: The sequence.
            budget: Bounds of the tree, at least 1.
        """
