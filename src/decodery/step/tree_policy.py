"""Base class of tree policies, which decide which nodes of a draft tree are expanded and kept."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodery.core.abstract import Contract
from decodery.core.requirements import Provides, Requirements

from .draft_length_policy import Budget
from .draft_tree import DraftTree, Origin
from .forward_request import ForwardCoroutine
from .sequence import Sequence

if TYPE_CHECKING:
    from .tree_drafter import TreeDrafter

__all__ = ["TreePolicy"]


@dataclass(frozen=True)
class TreePolicy(Contract):
    """Grows trees with any drafter that can expand nodes.

    Fields are hyper-parameters; it has no state.

    Trees of sampled policies are verified with the distributions and the order of their draws. So the number of a
    node's children may depend on earlier draws, never on the next one, and a drawn node stays in the tree.
    """

    @property
    def requirements(self) -> Requirements:
        return Requirements()

    @property
    def provides(self) -> Provides:
        """The origin of siblings in its trees: one kind of `drafts`."""
        return Provides(drafts=("deterministic",))

    @property
    def origin(self) -> Origin:
        """The origin of its trees, see `DraftTree`."""
        (only,) = self.provides.drafts
        return only

    def largest(self) -> int | None:
        """Maximum number of nodes of its trees, by its settings; None where they set no bound."""
        return None

    @abstractmethod
    def grow(self, expander: TreeDrafter, seq: Sequence, budget: Budget) -> ForwardCoroutine[DraftTree]:
        """Grow a tree rooted at the last token, within the budget.

        Args:
            expander: A drafter that gives distributions after any node.
            seq: The sequence.
            budget: Bounds of the tree; `nodes` and `depth` are at least 1.
        """
