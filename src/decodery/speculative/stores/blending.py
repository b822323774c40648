"""How far an adviser's guesses are to be trusted beside what was counted: measured as texts go on."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter, mul

from decodery.step.drafter_memory import Guarded

from .expectations import Candidate

Offer = tuple[float, int]
"""A token that may come next: its chance, and itself."""
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Between these probabilities an adviser is right more or less often than it says, by factors of their own."""
_SAID, _BELIEVED, _FEW = 2.0, 5.0, 1.0
"""What is believed at first of a range's guesses, of a place and of all places: worth so many guesses or opinions."""
_WEIGHT = 0.5
_RECENT = 100.0
"""Opinions of the latest steps that weigh as much as any."""
_NEVER = 1e-3
"""The probability of a token that no source proposed."""
_LIFT, _FIRST = 0.4, 5.0
"""What an adviser is believed to add to the best chance at every second place, and how many answers that is worth."""
_PLACES, _MOST = 10, 200.0
"""Ranges of chances that are told apart, and how many answers of each are remembered."""
_chance = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Told:
    """Who expected what after a node.

    Attributes:
        place: See `Blending`.
        counted, said: Chances by token, without an adviser and its own.
    """

    place: tuple[int, int]
    counted: dict[int, float]
    said: dict[int, float]


class Blending(Guarded):
    """Mixes counted probabilities with an adviser's, by weights learned from the texts.

    A weight belongs to a place: the length of the repetition that is copied, and the longest context that is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[tuple[int, int], tuple[float, float]] = {}
        # That of all places together, with which a new one begins.
        self._usual = _WEIGHT, _FEW
        # Per range of probabilities: how often it was right, and how often it said it would be. Of its most likely
        # token apart: where texts are greedy, that is right more often than others of the same probability.
        ranges = len(_EDGES) + 1
        self._hits, self._mass = ([[_SAID] * ranges for _ in range(2)] for _ in range(2))
        # What the best chance became with an adviser, by what it was without: [range before][range after].
        self._became = [[0.0] * _PLACES for _ in range(_PLACES)]
        for before, became in enumerate(self._became):
            for after in (before, min(before + int(_LIFT * _PLACES), _PLACES - 1)):
                became[after] += _FIRST / 2

    def hoped(self, best: float) -> float:
        """The expected probability of the most likely token with an adviser; `best` without it."""
        became = self._became[_range(best)]
        return sum(_middle(after) * count for after, count in enumerate(became)) / sum(became)

    def gain(self, best: float, chance: float, row: float) -> float:
        """Expected tokens that an adviser's answer about a node saves, by the value of its best child.

        Args:
            best: That child's chance without the question.
            chance: The node's own.
            row: What a child's must be to be fed.
        """
        became = self._became[_range(best)]
        after = sum(max(chance * _middle(each) - row, 0.0) * count for each, count in enumerate(became)) / sum(became)
        return after - max(chance * best - row, 0.0)

    def most(self, row: float) -> float:
        """Expected tokens that an answer about the end of a text saves at most, whatever is counted there.

        Args:
            row: What a child's chance must be to be fed.
        """
        worth = [max(_middle(each) - row, 0.0) for each in range(_PLACES)]
        after = (sum(map(mul, worth, became)) / sum(became) for became in self._became)
        return max(found - max(of / _PLACES - row, 0.0) for of, found in enumerate(after))

    def blend(
        self, place: tuple[int, int], counted: list[Candidate], said: dict[int, float]
    ) -> tuple[list[Offer], Told]:
        """The tokens that may come next, most likely first, by both.

        Args:
            said: What an adviser gives its most likely.
        """
        weight = self._weights.get(place, self._usual)[0]
        told = Told(place, {token: chance for chance, token, _ in counted}, said)
        chances = {token: (1 - weight) * chance for token, chance in told.counted.items()}
        for token, chance in self._worth(said).items():
            chances[token] = chances.get(token, 0.0) + weight * chance
        offers = [(chance, token) for token, chance in chances.items()]
        offers.sort(key=_chance, reverse=True)
        before = counted[0][0] if counted else 0.0
        became = self._became[_range(before)]
        became[_range(offers[0][0] if offers else 0.0)] += 1
        if sum(became) > _MOST:
            became[:] = [count / 2 for count in became]
        return offers, told

    def learn(self, told: Told, token: int) -> None:
        """`token` is what came."""
        chances = self._worth(told.said).get(token, 0.0), told.counted.get(token, 0.0)
        known = self._weights.get(told.place, (self._usual[0], _BELIEVED))
        self._weights[told.place], self._usual = _moved(*known, *chances), _moved(*self._usual, *chances)
        for rank, (other, said) in enumerate(told.said.items()):
            kind, of = rank > 0, bisect_right(_EDGES, said)
            self._mass[kind][of] += said
            self._hits[kind][of] += other == token

    def _worth(self, said: dict[int, float]) -> dict[int, float]:
        """The chances of tokens by the probabilities that an adviser gave them, the most likely first."""
        found = {}
        for rank, (token, chance) in enumerate(said.items()):
            kind, of = rank > 0, bisect_right(_EDGES, chance)
            found[token] = min(chance * self._hits[kind][of] / self._mass[kind][of], 1.0)
        return found


def _moved(weight: float, seen: float, said: float, counted: float) -> tuple[float, float]:
    """A weight that so many opinions have taught, after one more: the chances that either side gave what came."""
    ours, others = weight * max(said, _NEVER), (1 - weight) * max(counted, _NEVER)
    seen = min(seen + 1, _RECENT)
    return weight + (ours / (ours + others) - weight) / seen, seen


def _range(chance: float) -> int:
    return min(int(chance * _PLACES), _PLACES - 1)


def _middle(of: int) -> float:
    return (of + 0.5) / _PLACES
