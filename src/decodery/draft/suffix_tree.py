"""SuffixDecoding: trees of what followed most often, in this text and in past outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..budget.base import Budget
from ..core.memory import Scope
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..errors import SettingsError
from ..registry import register
from .base import Drafter, Observation
from .shapes.best_first import Grown, Place, grow
from .stores.automaton import SuffixAutomaton
from .stores.suffix_trie import SuffixTrie

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
    """Grows what followed earlier occurrences of the last few tokens, likeliest first, and trusts long matches further.

    depth: longest run of tokens counted. factor, offset: after a match of m tokens up to factor * m + offset are
    drafted. least: no node of smaller path probability, the product of count ratios. branch: a tree, or a chain of the
    likeliest tokens. Every match length is tried, in the text itself and in past outputs; the draft whose
    probabilities sum to most wins. nodes: at most so many. scope: how long outputs are remembered ("request": not at
    all). Memory: two states per token of the text; past outputs up to 32,768 tokens, oldest leave first.
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

        past = seq.memory.recall(self.scope, seq, ("suffix-tree", self.depth), make)
        return _Memory(SuffixAutomaton(self.depth), past)

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        memory: _Memory = seq.draft_state
        memory.own.extend(seq.tokens)
        best = Grown([], [], 0.0)
        for grown in (self._from_text(memory.own, budget), self._from_past(memory.past, seq.tokens, budget)):
            if grown.score > best.score:
                best = grown
        return best.tree(seq.pending)

    def observe(self, seq: Sequence, seen: Observation) -> None:
        if seq.finished and self.scope != "request":
            seq.draft_state.past.add(seq.generated)

    def match_length(self, seq: Sequence) -> int:
        """How many of the last tokens stand earlier in the text or in a past output."""
        memory: _Memory = seq.draft_state
        memory.own.extend(seq.tokens)
        with memory.past.lock:
            return max(min(memory.own.matched, self.depth), self._longest(memory.past, seq.tokens))

    def _from_text(self, own: SuffixAutomaton, budget: Budget) -> Grown:
        def matches() -> Iterator[tuple[int, int]]:
            # Ends of the text by falling length; those of one state go on alike, so the longest of them counts.
            state, length = own.recent, min(len(own.tokens), self.depth)
            while state > 0:
                if own.count[state] > 1:
                    yield length, state
                state = own.link[state]
                length = own.length[state]

        def following(state: int) -> list[tuple[int, int]]:
            # Strings longer than `depth` are not counted.
            return [(token, after) for token, after in own.next[state].items() if own.count[after]]

        best = Grown([], [], 0.0)
        for length, state in matches():
            if best.score >= self._nodes(length, budget):
                break
            grown = self._grow(state, own.count.__getitem__, following, length, budget)
            if grown.score > best.score:
                best = grown
        return best

    def _from_past(self, past: SuffixTrie, tokens: list[int], budget: Budget) -> Grown:
        best = Grown([], [], 0.0)
        with past.lock:
            for length in range(self._longest(past, tokens), 0, -1):
                if best.score >= self._nodes(length, budget):
                    break
                place = past.find(tokens[-length:])
                assert place is not None
                grown = self._grow(place, past.count, past.following, length, budget)
                if grown.score > best.score:
                    best = grown
        return best

    def _grow(
        self,
        place: Place,
        count: Callable[[Place], int],
        following: Callable[[Place], list[tuple[int, Place]]],
        length: int,
        budget: Budget,
    ) -> Grown:
        return grow(
            place,
            count,
            following,
            nodes=self._nodes(length, budget),
            depth=min(budget.depth, self.depth - length),
            least=self.least,
            branch=self.branch,
        )

    def _nodes(self, length: int, budget: Budget) -> int:
        return min(int(self.factor * length) + self.offset, self.nodes, budget.nodes)

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
