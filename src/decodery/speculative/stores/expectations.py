"""How likely each token is to come next, by what was copied and ranked before and by how often that was right."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gamma, log
from operator import itemgetter

import numpy as np

from decodery.core import noise

from .contexts import Contexts
from .ngrams import Occurrences, copy
from .past import PastTexts

LEAST = 0.01
"""What is left to guess at worst; nothing less likely is worth a row."""
_LENGTHS = (1, 2, 3, 4, 6, 9, 14, 22)
"""Lengths of repetitions at which copies are trusted anew."""
_TRUST = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""How often a copy is right after a repetition of each length, until it is measured."""
_PRIOR = 6.0
CONTEXTS = (3, 2, 1)
"""Lengths of the contexts whose successors are known."""
_NOWHERE = len(CONTEXTS)
_FORGET = 0.97
HEED = 0.35
"""How far the noise of a token tells whether it will be drawn: 0 not at all, 1 as if all chances were exact.

Of 0.2, 0.4, ... 1 on 24 answers of the embedded model at temperature 0.7, 0.4 and 0.3 predicted most.
"""
MEAN = gamma(1 - HEED)
"""What the noise of a token counts for on average: E[exp(HEED * g)] of Gumbel noise g."""
_chance = itemgetter(0)


class CopyRates:
    """How often the token after a repetition was repeated too, by the repetition's length.

    Recent times count more.
    """

    def __init__(self) -> None:
        self.hits = np.array(_TRUST) * _PRIOR
        self.seen = np.full(len(_TRUST), _PRIOR)

    def rate(self, length: int) -> float:
        """Chance that a copy of the token after a repetition of `length` tokens is right."""
        at = _bucket(length)
        return float(self.hits[at] / self.seen[at])

    def learn(self, length: int, right: bool) -> None:
        """One copy turned out right or wrong."""
        at = _bucket(length)
        # What was believed first never loses all its weight, so that one mistake in a long text is not the end.
        self.hits[at] = self.hits[at] * _FORGET + right + (1 - _FORGET) * _TRUST[at]
        self.seen[at] = self.seen[at] * _FORGET + 1 + (1 - _FORGET)


class SuccessorRates:
    """How often the token at each place of a ranking came next, where nothing told before it did.

    Kept apart by the longest context that was known and by the one whose ranking it is: of[best, order, rank], seen so
    many times.

    Args:
        first: The rates that are believed until they are measured; by default rank r is right once in (r + 1)(r + 2)
            times.
    """

    def __init__(self, orders: int, width: int, first: np.ndarray | None = None) -> None:
        ranks = np.arange(width)
        believed = np.tile(1 / ((ranks + 1.0) * (ranks + 2.0)), (orders, orders, 1))
        if first is not None:
            believed[:, :, : first.shape[2]] = first[:, :, :width]
        self.of = believed
        self.seen = np.full(believed.shape, _PRIOR)

    def learn(self, best: int, order: int, rank: int, right: bool) -> None:
        at = best, order, rank
        self.seen[at] += 1
        self.of[at] += (right - self.of[at]) / self.seen[at]


Candidate = tuple[float, int, tuple[int, int, int] | None]
"""A token that may come next: its chance, itself, and whose guess it is: (best order, order, rank), None for a copy."""


@dataclass(slots=True)
class Expectations:
    """Candidates for one text: copies of what followed its end before, and contexts.

    Attributes:
        past, trusted: Earlier texts, one of which is copied where it agrees with the end of this one for longer than
            this one itself does, and how far such copies are trusted.
        trust: How far copies of the text itself are.
        copied: The copy since the last `find`.
        repeated: Over how many tokens what stood before it agrees with the end.
    """

    copies: Occurrences
    contexts: Contexts
    rates: SuccessorRates
    past: PastTexts = field(default_factory=lambda: PastTexts(()))
    trusted: CopyRates = field(default_factory=CopyRates)
    trust: CopyRates = field(default_factory=CopyRates)
    copied: list[int] = field(default_factory=list)
    repeated: int = 0
    _others: bool = False

    def find(self, text: list[int], length: int) -> None:
        """Copy up to `length` tokens for the end of `text`, which has only grown."""
        self.copies.extend(text)
        found = self.copies.find(text)
        self.copied = copy(text, found[0], length) if found else []
        self.repeated = _repeated(text, found[0]) if found else 0
        self._others = False
        if self.repeated < _LENGTHS[-1]:
            copied, repeated = self.past.after(text, length, _LENGTHS[-1])
            if copied and repeated > self.repeated:
                self.copied, self.repeated, self._others = copied, repeated, True

    @property
    def trusts(self) -> tuple[CopyRates, CopyRates]:
        return self.trust, self.trusted

    @property
    def trust_now(self) -> CopyRates:
        """How far the copy since the last `find` is trusted."""
        return self.trusted if self._others else self.trust

    def place(self, followed: int, counted: list[Candidate]) -> tuple[int, int]:
        """The kind of `candidates`: the length of the repetition and the longest known context."""
        length = _bucket(self.repeated + followed) if 0 <= followed < len(self.copied) else -1
        return length, next((source[0] for _, _, source in counted if source is not None), _NOWHERE)

    def follows(self, followed: int, token: int) -> int:
        """How far `token` follows the copy after a node that does so for `followed` tokens.

        -1 where either left it.
        """
        return followed + 1 if 0 <= followed < len(self.copied) and self.copied[followed] == token else -1

    def candidates(
        self, context: list[int], followed: int, least: float = 0.0, drawn: tuple[int, int] | None = None
    ) -> list[Candidate]:
        """What may follow `context` with a chance of `least` or more, most likely first.

        Args:
            followed: How far the context follows the copy, -1 if it left it.
            drawn: The seed and the output position whose noise draws the token, None where nothing is left to chance.
        """
        found: list[Candidate] = []
        told, left = set(), 1.0
        if 0 <= followed < len(self.copied):
            chance = self.trust_now.rate(self.repeated + followed)
            found.append((chance, self.copied[followed], None))
            told.add(self.copied[followed])
            left -= chance
        best = -1
        for order, row in enumerate(self.contexts.rows(context)):
            if row is None:
                continue
            best = order if best < 0 else best
            spent = 0.0
            for rank, (token, rate) in enumerate(zip(row, self.rates.of[best, order].tolist(), strict=True)):
                if token >= 0 and token not in told:
                    chance = left * rate
                    spent += chance
                    told.add(token)
                    found.append((chance, token, (best, order, rank)))
            left = max(left - spent, LEAST)
        if drawn is not None:
            found = _heeded(found, *drawn)
        found = [each for each in found if each[2] is None or each[0] >= least]
        found.sort(key=_chance, reverse=True)
        return found

    def learn_all(self, text: list[int], first: int) -> None:
        """The tokens of `text` from `first` on came after the end that was asked about."""
        context, followed = text[max(0, first - CONTEXTS[0]) : first], 0
        for token in text[first:]:
            self.learn(context, followed, token)
            followed = self.follows(followed, token)
            context = [*context[1 - CONTEXTS[0] :], token]

    def learn(self, context: list[int], followed: int, token: int) -> None:
        """`token` came after `context`: whoever was asked before it was told is right or wrong."""
        guesses = self.candidates(context, followed)
        if 0 <= followed < len(self.copied):
            copied = self.copied[followed] == token
            self.trust_now.learn(self.repeated + followed, copied)
            if copied:
                return
        told = next((source[1] for _, guess, source in guesses if source and guess == token), _NOWHERE)
        for _, guess, source in guesses:
            if source is not None and source[1] <= told:
                self.rates.learn(*source, guess == token)


def _heeded(found: list[Candidate], seed: int, position: int) -> list[Candidate]:
    """With what is known of the draw: were chances exact, the token with the largest log chance + noise would come."""
    weights = [chance * (-log(noise.draw(seed, position, token, noise.TOKEN))) ** -HEED for chance, token, _ in found]
    rest = max(1.0 - sum(chance for chance, _, _ in found), LEAST) * MEAN
    whole = rest + sum(weights)
    return [(weight / whole, token, source) for weight, (_, token, source) in zip(weights, found, strict=True)]


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
