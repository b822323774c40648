"""SuffixDecoding: trees of what followed most often, in this text and in past outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter, VerificationFeedback
from decodery.step.drafter_memory import Scope
from decodery.step.sequence import Sequence

from ..stores.automaton import SuffixAutomaton
from ..stores.suffix_trie import Cursor, SuffixTrie
from ..tree_building.best_first import Grown, Place, grow

_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class _Memory:
    own: SuffixAutomaton
    past: SuffixTrie


@register(
    "suffix-tree",
    paper="SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications (2024)",
    lossless=True,
)
@dataclass(frozen=True)
class SuffixTree(Drafter):
    """Grows what followed earlier occurrences of the last tokens, and trusts long matches further.

    Memory: two states per token of the text; past outputs up to 32,768 tokens, oldest leave first.

    Attributes:
        depth: Longest run of tokens counted.
        factor, offset: After a match of m tokens up to factor * m + offset are drafted.
        least: No node of smaller path probability, the product of count ratios.
        branch: A tree, or a chain of the most likely tokens. Every match length is tried, in the text itself and in
            past outputs; the draft whose probabilities sum to most wins.
        nodes: At most so many.
        scope: How long outputs are remembered ("request": not at all).
    """

    depth: int = 64
    factor: float = 1.0
    offset: int = 0
    least: float = 0.1
    branch: bool = True
    nodes: int = 64
    scope: Scope = "process"

    def __post_init__(self) -> None:
        if self.depth < 2 or self.factor <= 0 or self.offset < 0 or not 0 < self.least <= 1 or self.nodes < 1:
            raise SettingsError(
                "suffix-tree needs depth >= 2, factor > 0, offset >= 0, least above 0 and up to 1, and nodes >= 1"
            )

    def largest(self) -> int:
        return self.nodes

    def start(self, seq: Sequence) -> _Memory:
        def make() -> SuffixTrie:
            return SuffixTrie(self.depth, _TOKENS)

        past = seq.request.memory.recall(self.scope, seq, ("suffix-tree", self.depth), make)
        return _Memory(SuffixAutomaton(self.depth), past)

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        memory: _Memory = seq.states[self]
        memory.own.extend(seq.tokens)
        own, past = self._from_text(memory.own, budget), self._from_past(memory.past, seq.tokens, budget)
        return (past if past.score > own.score else own).tree(seq.last_token)

    def observe(self, seq: Sequence, seen: VerificationFeedback) -> None:
        if seq.finished and self.scope != "request":
            seq.states[self].past.add(seq.generated)

    def match_length(self, seq: Sequence) -> int:
        """How many of the last tokens stand earlier in the text or in a past output."""
        memory: _Memory = seq.states[self]
        memory.own.extend(seq.tokens)
        with memory.past.lock:
            return max(min(memory.own.matched, self.depth), self._longest(memory.past, seq.tokens))

    def _from_text(self, own: SuffixAutomaton, budget: Budget) -> Grown:
        # By length of an end of the text, its state. Those of one state go on alike, and differ in what they may draft.
        places: list[int] = []
        state = own.recent
        while state > 0:
            longest, shorter = min(own.length[state], len(own.tokens), self.depth), own.length[own.link[state]]
            if own.count[state] > 1:
                places[:0] = [state] * (longest - shorter)
            state = own.link[state]

        def following(state: int) -> list[tuple[int, int]]:
            # Strings longer than `depth` are not counted.
            return [(token, after) for token, after in own.next[state].items() if own.count[after]]

        return self._best(len(places), lambda length: places[length - 1], own.count.__getitem__, following, budget)

    def _from_past(self, past: SuffixTrie, tokens: list[int], budget: Budget) -> Grown:
        def place(length: int) -> Cursor:
            found = past.find(tokens[-length:])
            assert found is not None
            return found

        with past.lock:
            return self._best(self._longest(past, tokens), place, past.count, past.following, budget)

    def _best(
        self,
        longest: int,
        place_of: Callable[[int], Place],
        count: Callable[[Place], int],
        following: Callable[[Place], list[tuple[int, Place]]],
        budget: Budget,
    ) -> Grown:
        """The draft whose probabilities sum to most, of matches of all lengths; of equal ones the longest match's.

        place_of: where a match of a length leads. A match is left out only where its draft cannot sum to more.
        """
        shares: dict[Place, tuple[float, float]] = {}

        def most(length: int) -> int:
            return min(self._nodes(length, budget), self._levels(length, budget))

        best, matched = Grown([], [], 0.0), 0
        for length in sorted(range(1, longest + 1), key=lambda length: (most(length), length), reverse=True):
            if (most(length), length) <= (best.score, matched):
                break
            place, nodes, levels = place_of(length), self._nodes(length, budget), self._levels(length, budget)
            if place not in shares:
                counts = [count(after) for _, after in following(place)]
                shares[place] = max(counts, default=0) / count(place), sum(counts) / count(place)
            # No node is likelier than the most likely of the first level, and no level than the first.
            node, level = shares[place]
            if (min(node * nodes, level * levels), length) <= (best.score, matched):
                continue
            grown = grow(place, count, following, nodes=nodes, depth=levels, least=self.least, branch=self.branch)
            if (grown.score, length) > (best.score, matched):
                best, matched = grown, length
        return best

    def _nodes(self, length: int, budget: Budget) -> int:
        return min(int(self.factor * length) + self.offset, self.nodes, budget.nodes)

    def _levels(self, length: int, budget: Budget) -> int:
        """How deep a draft may go after a match: runs are counted up to `depth` tokens."""
        return min(self.depth - length, budget.depth)

    def _longest(self, past: SuffixTrie, tokens: list[int]) -> int:
        """Length of the longest end of the text that past outputs hold: every end of what they hold is held too."""
        low, high = 0, min(self.depth, len(tokens))
        while low < high:
            middle = (low + high + 1) // 2
            if past.find(tokens[-middle:]) is None:
                high = middle - 1
            else:
                low = middle
        return low
