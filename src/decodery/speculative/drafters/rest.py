"""REST: the commonest continuations in a datastore."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence

from ..stores.datastore import Datastore
from ..tree_building.frequency import frequency_tree


@register(
    "rest",
    paper="REST: Retrieval-Based Speculative Decoding (2023)",
    lossless=True,
    slower=True,
    requirements=("a datastore made by `decodery train datastore -m MODEL FILES --out DIR`",),
)
@dataclass(frozen=True)
class REST(Drafter):
    """Drafts the commonest continuations, in a corpus, of the longest end of the text that occurs there.

    Scope: the process, and nothing is learned; memory: the datastore stays on disk.

    Attributes:
        datastore: A folder made by `decodery train datastore`, or a `Datastore`.
        longest, shortest: How many tokens must match.
        continuations, length: So many occurrences are looked at, so far ahead.
        nodes: The commonest beginnings of these become the tree.
    """

    datastore: str | Datastore
    longest: int = 16
    shortest: int = 2
    continuations: int = 5000
    length: int = 10
    nodes: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest or min(self.continuations, self.length, self.nodes) < 1:
            raise SettingsError("rest needs 1 <= shortest <= longest and continuations, length and nodes >= 1")

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> Datastore:
        store = Datastore.open(self.datastore) if isinstance(self.datastore, str) else self.datastore
        store.fits(seq.request.vocab_size)
        return store

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        store: Datastore = seq.states[self]
        matched = store.longest(seq.tokens[-self.longest :], self.shortest)
        if not matched:
            return DraftTree.root(seq.last_token)
        length = min(self.length, budget.depth)
        windows = store.continuations(seq.tokens[-matched:], self.continuations, length)
        return frequency_tree(seq.last_token, windows, min(self.nodes, budget.nodes), seq.request.vocab_size)

    def match_length(self, seq: Sequence) -> int:
        """How many of the last tokens occur in the datastore."""
        return int(seq.states[self].longest(seq.tokens[-self.longest :], self.shortest))
