"""A composite that gives its parts less room than it has."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.budget.base import Budget
from decodery.core.ask import drive
from decodery.core.sequence import Sequence
from decodery.core.tree import TokenTree
from decodery.draft.base import Composite, Drafter


@dataclass(frozen=True)
class Narrow(Composite):
    """Asks another drafter for less than the engine allows, and checks that it keeps to that."""

    inner: Drafter
    nodes: int
    depth: int

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.inner,)

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        with self.part(seq, 0) as drafter:
            tree = drive(drafter.propose(seq, Budget(nodes, depth)))
        tree.validate()
        assert tree.tokens[0] == seq.pending
        assert len(tree) <= nodes + 1 and tree.depths.max() <= depth
        assert tree.tokens.min() >= 0 and tree.tokens.max() < seq.vocab_size
        return tree
