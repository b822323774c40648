"""How far a head's guesses are to be trusted beside what was counted: measured as texts go on."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter

from ...core.memory import Guarded
from .expectations import Candidate

Offer = tuple[float, int]
"""A token that may come next: its chance, and itself."""
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Between these probabilities a head is right as often as it says, or more, or less often, by factors of their own."""
_BELIEVED = 5.0
"""How many right guesses and opinions what is believed first is worth."""
_WEIGHT = 0.5
_RECENT = 100.0
"""Opinions of the latest steps that weigh as much as any."""
_NEVER = 1e-3
"""The chance of what nobody guessed."""
_LIFT = 0.3
"""What a head's guess is believed to add to the best chance first, where nothing else is known."""
_PLACES = 10
_chance = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Told:
    """Who expected what behind a node. place: see `Blending`; counted, head: chances by token, without and by it."""

    place: tuple[int, int]
    counted: dict[int, float]
    head: dict[int, float]


class Blending(Guarded):
    """Mixes chances that were counted with a head's probabilities, by weights that the texts themselves have taught.

    A weight belongs to a place: the length of the repetition that is copied, and the longest context that is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[tuple[int, int], tuple[float, float]] = {}
        # Per range of probabilities: how often it was right, and how often it said it would be.
        self._hits, self._mass = [_BELIEVED] * (len(_EDGES) + 1), [_BELIEVED] * (len(_EDGES) + 1)
        self._lifts = [_LIFT * (1 - (place + 0.5) / _PLACES) for place in range(_PLACES)]

    def lift(self, best: float) -> float:
        """What a head adds to the chance of the likeliest token, on average, where that was `best` without it."""
        return self._lifts[min(int(best * _PLACES), _PLACES - 1)]

    def blend(
        self, place: tuple[int, int], counted: list[Candidate], head: dict[int, float]
    ) -> tuple[list[Offer], Told]:
        """The tokens that may come next, likeliest first, by both. head: its likeliest tokens' probabilities."""
        weight = self._weights.get(place, (_WEIGHT, 0.0))[0]
        told = Told(place, {token: chance for chance, token, _ in counted}, head)
        chances = {token: (1 - weight) * chance for token, chance in told.counted.items()}
        for token, said in head.items():
            chances[token] = chances.get(token, 0.0) + weight * self._worth(said)
        offers = [(chance, token) for token, chance in chances.items()]
        offers.sort(key=_chance, reverse=True)
        before = counted[0][0] if counted else 0.0
        at = min(int(before * _PLACES), _PLACES - 1)
        self._lifts[at] += ((offers[0][0] if offers else 0.0) - before - self._lifts[at]) / _RECENT
        return offers, told

    def learn(self, told: Told, token: int) -> None:
        """`token` is what came."""
        weight, seen = self._weights.get(told.place, (_WEIGHT, _BELIEVED))
        head = weight * max(self._worth(told.head.get(token, 0.0)), _NEVER)
        counted = (1 - weight) * max(told.counted.get(token, 0.0), _NEVER)
        seen = min(seen + 1, _RECENT)
        self._weights[told.place] = weight + (head / (head + counted) - weight) / seen, seen
        for other, said in told.head.items():
            of = bisect_right(_EDGES, said)
            self._mass[of] += said
            self._hits[of] += other == token

    def _worth(self, said: float) -> float:
        """The chance of a token that a head gave this probability."""
        of = bisect_right(_EDGES, said)
        return min(said * self._hits[of] / self._mass[of], 1.0)
