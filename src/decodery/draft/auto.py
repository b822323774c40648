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
from .shapes.template import RankRates
from .stores.adjacency import Adjacency
from .stores.ngrams import NGrams, copy

_LEAST = 0.01
"""A node less likely than this to become text is never worth its row."""
_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 22)
"""Lengths of repetitions at which copies are trusted anew."""
_TRUST = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""How often a copy is right after a repetition of each length, until it is measured."""
_PRIOR = 6.0
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


@dataclass(slots=True)
class _Memory:
    """What `auto` knows of one sequence, and what it would have copied at the last step."""

    copies: NGrams
    successors: Adjacency
    ranks: RankRates
    trust: CopyRates = field(default_factory=CopyRates)
    copied: list[int] = field(default_factory=list)
    repeated: int = 0


@register("auto", lossless=True)
@dataclass(frozen=True)
class Auto(Drafter):
    """Weighs copies of earlier text against the model's own runners-up and feeds as many as this machine makes pay.

    Candidates after a node: the token that followed the last repetition of its `orders` last tokens (prompt lookup),
    and the `width` successors the model ranked highest where the token last stood (as Token Recycling, 2024). How
    often such candidates are right is counted as the text goes on, by length of the repetition and by rank, fed or not;
    a node's chance is the product along its path. The tree takes nodes by falling chance, and of all its sizes, 0
    included, the one that gives most tokens per second on the measured cost of a pass. Scope: successors and their
    rates last as long as the loaded model, copies as long as the request. Memory: 4 * vocabulary * width bytes, and one
    entry per order and token of text.
    """

    width: int = 6
    orders: tuple[int, ...] = (12, 8, 5, 3, 2, 1)
    most: int = 32

    weighs_cost = True

    def start(self, seq: Sequence) -> _Memory:
        def make() -> tuple[Adjacency, RankRates]:
            return Adjacency(seq.vocab_size, self.width), RankRates(min(self.width, seq.vocab_size))

        successors, ranks = seq.memory.recall("process", seq, ("auto", seq.vocab_size, self.width), make)
        return _Memory(NGrams(self.orders), successors, ranks)

    def propose(self, seq: Sequence, budget: Budget) -> TokenTree:
        memory: _Memory = seq.draft_state
        limit = min(self.most, budget.nodes)
        memory.copies.extend(seq.tokens)
        found = memory.copies.find(seq.tokens)
        memory.copied = copy(seq.tokens, found[0], min(limit, budget.depth)) if found else []
        memory.repeated = _repeated(seq.tokens, found[0]) if found else 0
        tokens, parents, chances = _grow(seq, memory, limit, budget.depth)
        size = 1 + _worthwhile(np.array(chances[1:]), budget)
        return TokenTree(np.array(tokens[:size]), np.array(parents[:size]))

    def observe(self, seq: Sequence, seen: Observation) -> None:
        memory: _Memory = seq.draft_state
        if seen.emitted:
            run = np.array(seq.tokens[-len(seen.emitted) - 1 :])
            memory.ranks.learn(memory.successors.ranks(run[:-1], run[1:]))
        for at, (copied, token) in enumerate(zip(memory.copied, seen.emitted, strict=False)):
            memory.trust.learn(memory.repeated + at, copied == token)
            if copied != token:
                break
        memory.successors.learn(seen)


def _grow(seq: Sequence, memory: _Memory, limit: int, depth: int) -> tuple[list[int], list[int], list[float]]:
    """The `limit` likeliest nodes by falling chance, the root first: tokens, parents and chances."""
    ranks = memory.ranks.rates.tolist()
    tokens, parents, chances, depths = [seq.pending], [-1], [1.0], [0]
    # How far each node follows the copy, -1 where it left it; and the candidates after it, by falling chance.
    followed, candidates = [0], [_candidates(memory, ranks, seq.pending, 0)]
    heap: list[tuple[float, int, int]] = []

    def offer(parent: int, place: int) -> None:
        if place < len(candidates[parent]) and depths[parent] < depth:
            chance = chances[parent] * candidates[parent][place][0]
            if chance >= _LEAST:
                heappush(heap, (-chance, parent, place))

    offer(0, 0)
    while heap and len(tokens) <= limit:
        negative, parent, place = heappop(heap)
        token, node, at = candidates[parent][place][1], len(tokens), followed[parent]
        copies = 0 <= at < len(memory.copied) and memory.copied[at] == token
        tokens.append(token)
        parents.append(parent)
        chances.append(-negative)
        depths.append(depths[parent] + 1)
        followed.append(at + 1 if copies else -1)
        ended = token in seq.eos_ids
        candidates.append([] if ended else _candidates(memory, ranks, token, followed[node]))
        offer(parent, place + 1)
        offer(node, 0)
    return tokens, parents, chances


def _candidates(memory: _Memory, ranks: list[float], token: int, followed: int) -> list[tuple[float, int]]:
    """What may follow a node that carries `token`: chances and tokens, falling."""
    found: list[tuple[float, int]] = []
    copied, left = -1, 1.0
    if 0 <= followed < len(memory.copied):
        copied = memory.copied[followed]
        chance = memory.trust.rate(memory.repeated + followed)
        found.append((chance, copied))
        left -= chance
    row = memory.successors.row(token)
    found += [(left * rate, each) for rate, each in zip(ranks, row, strict=True) if each >= 0 and each != copied]
    return sorted(found, reverse=True) if len(found) > 1 and found[0][0] < found[1][0] else found


def _worthwhile(chances: np.ndarray, budget: Budget) -> int:
    """How many of the nodes (falling chances) to feed: the number with the most expected tokens per second."""
    if budget.pass_seconds is None:
        return len(chances)
    costs = budget.pass_seconds()
    # Every sequence in the pass adds its pending row and at least one token.
    expected = budget.sequences + np.concatenate(([0.0], chances.cumsum()))
    rows = np.minimum(budget.sequences + np.arange(len(expected)), len(costs) - 1)
    return int((expected / costs[rows]).argmax())


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
