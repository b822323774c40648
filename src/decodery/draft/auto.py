"""`auto`: of all tokens that could be drafted, the likeliest ones, as many as pay for themselves on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from ..budget.base import Budget
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..registry import register
from .base import Drafter, Observation
from .stores.contexts import Contexts
from .stores.ngrams import NGrams, copy

_LEAST = 0.01
"""A node less likely than this to become text is never worth its row."""
_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 22)
"""Lengths of repetitions at which copies are trusted anew."""
_TRUST = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""How often a copy is right after a repetition of each length, until it is measured."""
_PRIOR = 6.0
_CONTEXTS = (3, 2, 1)
_NOWHERE = len(_CONTEXTS)
_FORGET = 0.97


class CopyRates:
    """How often the token after a repetition was repeated too, by the repetition's length; recent times count more."""

    def __init__(self) -> None:
        self._hits = [trust * _PRIOR for trust in _TRUST]
        self._seen = [_PRIOR] * len(_TRUST)

    def rate(self, length: int) -> float:
        """Chance that a copy of the token after a repetition of `length` tokens is right."""
        at = _bucket(length)
        return self._hits[at] / self._seen[at]

    def learn(self, length: int, right: bool) -> None:
        """One copy turned out right or wrong."""
        at = _bucket(length)
        # What was believed first never loses all its weight, so that one mistake in a long text is not the end.
        self._hits[at] = self._hits[at] * _FORGET + right + (1 - _FORGET) * _TRUST[at]
        self._seen[at] = self._seen[at] * _FORGET + 1 + (1 - _FORGET)


class SuccessorRates:
    """How often the token at each place of a ranking came next, where nothing told before it did.

    Kept apart by the longest context that was known and by the one whose ranking it is. Until it is measured, rank r
    counts as right once in (r + 1)(r + 2) times.
    """

    def __init__(self, orders: int, width: int) -> None:
        self._hits = np.tile(
            _PRIOR / ((np.arange(width) + 1.0) * (np.arange(width) + 2.0)), (orders, orders, 1)
        ).tolist()
        self._seen = np.full((orders, orders, width), _PRIOR).tolist()

    def rate(self, best: int, order: int, rank: int) -> float:
        return self._hits[best][order][rank] / self._seen[best][order][rank]

    def learn(self, best: int, order: int, rank: int, right: bool) -> None:
        self._hits[best][order][rank] += right
        self._seen[best][order][rank] += 1


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A token that may come next, its chance, and whose guess it is: (best order, order, rank), or a copy."""

    chance: float
    token: int
    source: tuple[int, int, int] | None


@dataclass(slots=True)
class _Memory:
    """What `auto` knows of one sequence, and what it would have copied at the last step."""

    copies: NGrams
    contexts: Contexts
    rates: SuccessorRates
    trust: CopyRates = field(default_factory=CopyRates)
    copied: list[int] = field(default_factory=list)
    repeated: int = 0

    def candidates(self, context: list[int], followed: int) -> list[_Candidate]:
        """What may follow `context`, likeliest first; followed: how far it follows the copy, -1 if it left it."""
        found: list[_Candidate] = []
        told, left = set(), 1.0
        if 0 <= followed < len(self.copied):
            chance = self.trust.rate(self.repeated + followed)
            found.append(_Candidate(chance, self.copied[followed], None))
            told.add(self.copied[followed])
            left -= chance
        best = -1
        for order, row in enumerate(self.contexts.rows(context)):
            if row is None:
                continue
            best = order if best < 0 else best
            new = [(rank, token) for rank, token in enumerate(row) if token >= 0 and token not in told]
            guesses = [
                _Candidate(left * self.rates.rate(best, order, rank), token, (best, order, rank)) for rank, token in new
            ]
            told.update(token for _, token in new)
            left = max(left - sum(guess.chance for guess in guesses), _LEAST)
            found += guesses
        return sorted(found, key=lambda each: -each.chance)

    def learn(self, context: list[int], followed: int, token: int) -> None:
        """`token` came after `context`: whoever was asked before it was told is right or wrong."""
        guesses = self.candidates(context, followed)
        for guess in guesses:
            if guess.source is None:
                self.trust.learn(self.repeated + followed, guess.token == token)
                if guess.token == token:
                    return
        told = next((guess.source[1] for guess in guesses if guess.source and guess.token == token), _NOWHERE)
        for guess in guesses:
            if guess.source is not None and guess.source[1] <= told:
                self.rates.learn(*guess.source, guess.token == token)


@register("auto", lossless=True)
@dataclass(frozen=True)
class Auto(Drafter):
    """Weighs copies of earlier text against the model's own runners-up and feeds as many as this machine makes pay.

    Candidates after a node: the token that followed the last repetition of its `orders` last tokens (prompt lookup),
    and the `width` tokens the model ranked highest where the node's last three, two and one tokens last stood (as Token
    Recycling, 2024, with longer contexts first). How often such candidates are right is counted as the text goes on, by
    length of the repetition and by context and rank; a node's chance is the product along its path. The tree takes
    nodes by falling chance, and of all its sizes, 0 included, the one that gives most tokens per second on the measured
    cost of a pass. Scope: contexts and their rates last as long as the loaded model, copies as long as the request.
    Memory: 2^17 * (8 + 4 * width) bytes per context length, and one entry per order and token of text.
    """

    width: int = 6
    orders: tuple[int, ...] = (12, 8, 5, 3, 2, 1)
    most: int = 32

    weighs_cost = True

    def start(self, seq: Sequence) -> _Memory:
        width = min(self.width, seq.vocab_size)

        def make() -> tuple[Contexts, SuccessorRates]:
            return Contexts(_CONTEXTS, width), SuccessorRates(len(_CONTEXTS), width)

        contexts, rates = seq.memory.recall("process", seq, ("auto", seq.vocab_size, width), make)
        return _Memory(NGrams(self.orders), contexts, rates)

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        memory: _Memory = seq.draft_state
        limit = min(self.most, budget.nodes)
        memory.copies.extend(seq.tokens)
        found = memory.copies.find(seq.tokens)
        memory.copied = copy(seq.tokens, found[0], min(limit, budget.depth)) if found else []
        memory.repeated = _repeated(seq.tokens, found[0]) if found else 0
        costs = _costs(budget, limit)
        tokens, parents, chances = _grow(seq, memory, limit, budget.depth, _least(costs))
        expected = budget.sequences + np.cumsum(chances) - 1
        size = 1 + int((expected / costs[: len(expected)]).argmax())
        return TokenTree(np.array(tokens[:size]), np.array(parents[:size]))

    def observe(self, seq: Sequence, seen: Observation) -> None:
        memory: _Memory = seq.draft_state
        first = len(seq.tokens) - len(seen.emitted)
        context, followed = seq.tokens[max(0, first - _CONTEXTS[0]) : first], 0
        for token in seen.emitted:
            memory.learn(context, followed, token)
            copies = 0 <= followed < len(memory.copied) and memory.copied[followed] == token
            followed = followed + 1 if copies else -1
            context = [*context[1 - _CONTEXTS[0] :], token]
        memory.contexts.learn(seq.tokens, seen)


def _grow(
    seq: Sequence, memory: _Memory, limit: int, depth: int, least: float
) -> tuple[list[int], list[int], list[float]]:
    """The `limit` likeliest nodes of chance `least` or more, falling, the root first: tokens, parents and chances."""
    tokens, parents, chances, depths = [seq.pending], [-1], [1.0], [0]
    # How far each node follows the copy, -1 where it left it; its last tokens; what may follow it.
    followed, contexts = [0], [seq.tokens[-_CONTEXTS[0] :]]
    candidates = [memory.candidates(contexts[0], 0)]
    heap: list[tuple[float, int, int]] = []

    def offer(parent: int, place: int) -> None:
        if place < len(candidates[parent]) and depths[parent] < depth:
            chance = chances[parent] * candidates[parent][place].chance
            if chance >= least:
                heappush(heap, (-chance, parent, place))

    offer(0, 0)
    while heap and len(tokens) <= limit:
        negative, parent, place = heappop(heap)
        token, node, at = candidates[parent][place].token, len(tokens), followed[parent]
        copies = 0 <= at < len(memory.copied) and memory.copied[at] == token
        tokens.append(token)
        parents.append(parent)
        chances.append(-negative)
        depths.append(depths[parent] + 1)
        followed.append(at + 1 if copies else -1)
        contexts.append([*contexts[parent][1 - _CONTEXTS[0] :], token])
        ended = token in seq.eos_ids
        candidates.append([] if ended else memory.candidates(contexts[node], followed[node]))
        offer(parent, place + 1)
        offer(node, 0)
    return tokens, parents, chances


def _costs(budget: Budget, limit: int) -> np.ndarray:
    """[limit + 1] times of this pass with 0, 1, 2, ... drafted nodes; every sequence in it has a row of its own."""
    if budget.pass_seconds is None:
        return np.ones(limit + 1)
    costs = budget.pass_seconds()
    return costs[np.minimum(budget.sequences + np.arange(limit + 1), len(costs) - 1)]


def _least(costs: np.ndarray) -> float:
    """The chance below which no node is worth its row, even among as many as make rows cheapest."""
    if len(costs) < 2:
        return 1.0
    cheapest = ((costs[1:] - costs[0]) / np.arange(1, len(costs))).min()
    return max(_LEAST, float(cheapest / costs[0]))


def _bucket(length: int) -> int:
    at = 0
    while at + 1 < len(_LENGTHS) and _LENGTHS[at + 1] <= length:
        at += 1
    return at


def _repeated(tokens: list[int], start: int) -> int:
    """Over how many tokens, `_LENGTHS[-1]` at most, the text before `start` agrees with the text's end."""
    length = 0
    while length < min(start, _LENGTHS[-1]) and tokens[start - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
