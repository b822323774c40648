"""SAM decoding: copy what followed the longest suffix that stood before, the longer the match the more of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence

from ..stores.automaton import SuffixAutomaton as Automaton
from ..stores.datastore import Datastore
from ..tree_building.frequency import frequency_tree

_LONGEST = 48
"""Longest suffix looked up in a datastore, whose order is known for 64 tokens."""
_CONTINUATIONS = 500


@register(
    "suffix-automaton",
    paper="SAM Decoding: Speculative Decoding via Suffix Automaton (2024)",
    lossless=True,
)
@dataclass(frozen=True)
class SuffixAutomaton(Drafter):
    """Copies what followed the first occurrence of the longest suffix, in constant time per token.

    Scope: the request; memory: two states per token of the text.

    Attributes:
        length, factor: After a match of m tokens min(length, 1 + factor * m) tokens are drafted.
        datastore: A folder made by `decodery train datastore`; where its match is the longer one, a tree of its
            commonest continuations is drafted, `successors` nodes per depth at most.
        successors: Nodes per depth of a tree from the datastore.
        bias: Tokens by which a datastore's match counts as shorter, compared with the text's own and, as in
            `router(SuffixAutomaton(), TokenRecycling())`, with what other drafters need.
    """

    length: int = 40
    factor: float = 4.0
    datastore: str | None = None
    successors: int = 8
    bias: int = 5

    def __post_init__(self) -> None:
        if self.length < 1 or self.factor <= 0 or self.successors < 1 or self.bias < 0:
            raise SettingsError("suffix-automaton needs length >= 1, factor > 0, successors >= 1 and bias >= 0")

    def largest(self) -> int:
        return self.length

    def start(self, seq: Sequence) -> Any:
        if self.datastore is None:
            return Automaton(), None
        datastore = Datastore.open(self.datastore)
        datastore.fits(seq.request.vocab_size)
        return Automaton(), datastore

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        automaton, static = self._matches(seq)
        own = automaton.matched
        if static and (not own or static - self.bias > own):
            length = self._length(static, budget)
            windows = seq.states[self][1].continuations(seq.tokens[-static:], _CONTINUATIONS, length)
            return frequency_tree(seq.last_token, windows, length, seq.request.vocab_size, per_depth=self.successors)
        if not own:
            return DraftTree.root(seq.last_token)
        length = self._length(own, budget)
        # A shorter suffix may have stood further ahead of the end, where more follows.
        state, at = automaton.match, automaton.end[automaton.match]
        while automaton.link[state] > 0 and at + length >= len(seq.tokens):
            state = automaton.link[state]
            at = automaton.end[state]
        return DraftTree.chain(seq.last_token, np.asarray(seq.tokens[at + 1 : at + 1 + length], dtype=np.int64))

    def match_length(self, seq: Sequence) -> int:
        """Length of the longest match; one in the datastore counts for `bias` tokens less."""
        automaton, static = self._matches(seq)
        return max(automaton.matched, static - self.bias)

    def _matches(self, seq: Sequence) -> tuple[Automaton, int]:
        automaton, datastore = seq.states[self]
        automaton.extend(seq.tokens)
        return automaton, 0 if datastore is None else datastore.longest(seq.tokens[-_LONGEST:])

    def _length(self, match: int, budget: Budget) -> int:
        return min(self.length, 1 + int(self.factor * match), budget.nodes, budget.depth)
