"""A composite that gives its parts less room than it has."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.step.composite_drafter import Composite
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.forward_request import run_sync
from decodery.step.sequence import Sequence


@dataclass(frozen=True)
class Narrow(Composite):
    """Asks another drafter for less than the engine allows, and checks that it keeps to that."""

    inner: Drafter
    nodes: int
    depth: int

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.inner,)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        tree = run_sync(self.inner.propose(seq, Budget(nodes, depth)))
        tree.validate()
        assert tree.tokens[0] == seq.last_token
        assert len(tree) <= nodes + 1 and tree.depths.max() <= depth
        assert tree.tokens.min() >= 0 and tree.tokens.max() < seq.request.vocab_size
        return tree
