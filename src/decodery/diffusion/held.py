"""A canvas under a constraint: written tokens always belong to some allowed text, in any order of writing.

A constraint accepts prefixes of texts, while a canvas has holes. So a filling of the holes is searched for, by their
distributions in the last pass. A token is written only if the constraint allows the canvas with such a filling, and the
text can then end within the canvas (see `Closing`). So the canvas can always be completed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from decodery.core.errors import SettingsError
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

from .canvas import Canvas, Checks
from .closing import Closing
from .view import View


class Hold(NamedTuple):
    """A constraint and the vocabulary of its tokens."""

    constraint: Constraint
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Width:
    """Width of the search for fillings.

    Attributes:
        likely: Tokens of a hole that are tried.
        top: Fillings kept per position, the most likely ones.
        others: Fillings kept in addition, drawn at random.
    """

    likely: int
    top: int
    others: int


class _Filling(NamedTuple):
    """Tokens of holes by position, the constraint's state after them, and their log-probability in nats."""

    logprob: float
    state: Any
    tokens: dict[int, int]

    def and_then(self, place: int, token: int, state: Any, logprob: float) -> _Filling:
        return _Filling(self.logprob + logprob, state, {**self.tokens, place: token})


class Held:
    """The checks of a canvas against its constraint.

    Args:
        hold: The constraint and its vocabulary.
        canvas: The canvas.
        width: Width of the search for fillings.

    Attributes:
        place: The first hole.
        tokens: A filling that the constraint allows, to the end of a text.

    Raises:
        SettingsError: If no text is found that fits into the canvas.
    """

    def __init__(self, hold: Hold, canvas: Canvas, width: Width) -> None:
        self._constraint, self._canvas, self._width = hold.constraint, canvas, width
        if self._constraint.bonus is not None:
            raise SettingsError(
                "on a canvas a constraint is strict: leave out the bonus, which only makes allowed tokens more likely"
            )
        self._closing = Closing(hold.constraint, hold.vocabulary, [*canvas.eos_ids, canvas.mask_id])
        self._state = self._constraint.init([int(token) for token in canvas.tokens[: canvas.prompt_length]])
        self.place, self.tokens, self.checks = canvas.prompt_length, dict[int, int](), Checks()
        self._pass, self._known = -1, list[list[_Filling]]()
        canvas.checks = self.checks
        if self._closing.find(self._state, canvas.limit, thorough=True) is None:
            raise SettingsError(
                f"no text that the constraint allows was found that fits into {canvas.limit} tokens: give a longer "
                "canvas"
            )

    @property
    def _stop(self) -> int:
        return self._canvas.prompt_length + self._canvas.limit

    def accepts(self, view: View, place: int, token: int) -> bool:
        """Whether a token may be written at an open position; if so, `tokens` becomes a filling with it."""
        self.checks.tried += 1
        if self.tokens.get(place) == token:
            self.checks.known += 1
            # Fillings from this position on were made while it was a hole.
            self._known = self._known[: max(place - self.place, 0)]
            return True
        written = self._canvas.tokens.copy()
        written[place] = token
        fillings = [*self._before(view, place)]
        found = self._filling(view, written, fillings)
        if found is None:
            self.checks.refused += 1
            return False
        self.tokens, self._known = found.tokens, fillings
        return True

    def next_token(self, view: View) -> int:
        """A token that may be written at the first hole: that of the filling, or the most likely one."""
        self.checks.recovered += 1
        if self.place in self.tokens:
            return self.tokens[self.place]
        allowed = self._constraint.allowed(self._state)
        logprobs = _logprobs(view, self.place, len(allowed))
        order = _best(allowed, logprobs, self._width.likely)
        fit = (int(token) for token in order if self.accepts(view, self.place, int(token)))
        found = next(fit, None)
        if found is None:
            # A completion exists: one was found before the first token, and every accepted token had one.
            closed = self._closed(_Filling(0.0, self._state, {}), self.place, self._stop, thorough=True)
            assert closed is not None
            self.tokens = closed.tokens
            found = closed.tokens[self.place]
        return found

    def advance(self) -> int | None:
        """Advance to the next hole; returns the end token if no other token is allowed there."""
        canvas = self._canvas
        while self.place < len(canvas) and canvas.tokens[self.place] != canvas.mask_id:
            self._state = self._constraint.advance(self._state, int(canvas.tokens[self.place]))
            self.place += 1
            # Fillings start at the first hole.
            self._known = []
        if self.place < len(canvas):
            forced = self._constraint.forced(self._state, 1)
            if forced and forced[0] in canvas.eos_ids:
                return forced[0]
            if not forced and self._only_ends():
                return min(canvas.eos_ids)
        return None

    def _only_ends(self) -> bool:
        allowed = self._constraint.allowed(self._state)
        ends = [token for token in self._canvas.eos_ids if allowed[token]]
        return len(ends) > 0 and int(np.count_nonzero(allowed)) == len(ends)

    def _before(self, view: View, place: int) -> list[list[_Filling]]:
        """Fillings of the canvas as it is, of all positions from the first hole to the one before `place`.

        Every check after a pass needs them, so they are stored until a token before them is written.
        """
        if self._pass != self._canvas.passes:
            self._pass, self._known = self._canvas.passes, []
        known = self._known = self._known[: max(place - self.place, 0)]
        for each in range(self.place + len(known), place):
            known.append(self._extended(known[-1] if known else self._first, view, each, self._canvas.tokens[each]))
        return known

    @property
    def _first(self) -> list[_Filling]:
        return [_Filling(0.0, self._state, {})]

    def _filling(self, view: View, written: np.ndarray, fillings: list[list[_Filling]]) -> _Filling | None:
        """Search tokens for the holes before the last written position that also leave room for an end.

        Args:
            view: The last pass.
            written: [L] the canvas with the token that is tried.
            fillings: Fillings of the first positions; those of the others are appended.
        """
        canvas, first = self._canvas, self._canvas.prompt_length
        is_end = np.isin(written[first:], list(canvas.eos_ids))
        body = np.flatnonzero((written[first:] != canvas.mask_id) & ~is_end)
        last = max(first + int(body[-1]), self.place - 1) if len(body) else self.place - 1
        end = first + int(np.argmax(is_end)) if is_end.any() else None
        if end is not None and end < last:
            return None
        for place in range(self.place + len(fillings), last + 1):
            fillings.append(self._extended(fillings[-1] if fillings else self._first, view, place, int(written[place])))
            if not fillings[-1]:
                return None
        found = fillings[last - self.place] if last >= self.place else self._first
        stop = self._stop if end is None else min(end, self._stop)
        closed = (self._closed(each, last + 1, stop) for each in found)
        return next((each for each in closed if each is not None), None)

    def _extended(self, found: list[_Filling], view: View, place: int, token: int) -> list[_Filling]:
        """Fillings extended by one position: the most likely ones, then others drawn at random."""
        if token != self._canvas.mask_id:
            return [each._replace(state=self._after(each, token)) for each in found if self._may(each, token)]
        wider = [
            each.and_then(place, token, self._after(each, token), logprob)
            for each in found
            for token, logprob in self._likely(each, view, place)
        ]
        wider.sort(key=lambda each: -each.logprob)
        top, rest = wider[: self._width.top], wider[self._width.top :]
        draws = np.random.default_rng([self._canvas.seed, self._canvas.passes, place])
        chosen = draws.permutation(len(rest))[: self._width.others]
        return top + [rest[number] for number in sorted(chosen)]

    def _likely(self, filling: _Filling, view: View, place: int) -> Iterator[tuple[int, float]]:
        """The most likely tokens of a hole that are allowed there; if none of these is, other allowed tokens."""
        row = int(np.searchsorted(view.positions, place))
        some = False
        if row < len(view) and view.positions[row] == place:
            ids, best = view.likely(self._width.likely)
            for token, logprob in zip(ids[row], best[row], strict=True):
                if token not in self._canvas.eos_ids and np.isfinite(logprob) and self._may(filling, token):
                    some = True
                    yield token, logprob
        if some:
            return
        allowed = self._free(filling)
        logprobs = _logprobs(view, place, len(allowed))
        for token in _best(allowed, logprobs, self._width.likely):
            yield int(token), float(max(logprobs[token], -1e3))

    def _closed(self, filling: _Filling, first: int, stop: int, *, thorough: bool = False) -> _Filling | None:
        """Extend a filling from `first` to the end of the text, at most to `stop`; None where none is found."""
        found = self._closing.find(filling.state, stop - first, thorough=thorough) if stop >= first else None
        if found is None:
            return None
        canvas, place = self._canvas, first + len(found)
        end = {place: min(canvas.eos_ids)} if place < len(canvas) and canvas.eos_ids else {}
        return filling._replace(tokens={**filling.tokens, **dict(enumerate(found, start=first)), **end})

    def _free(self, filling: _Filling) -> np.ndarray:
        """[vocab] bool: tokens that are allowed next, without end tokens and the mask."""
        free = self._constraint.allowed(filling.state).copy()
        free[[*self._canvas.eos_ids, self._canvas.mask_id]] = False
        return free

    def _may(self, filling: _Filling, token: int) -> bool:
        self.checks.asked += 1
        return self._constraint.accepts(filling.state, token)

    def _after(self, filling: _Filling, token: int) -> Any:
        return self._constraint.advance(filling.state, token)


def _best(allowed: np.ndarray, logprobs: np.ndarray, count: int) -> np.ndarray:
    """[n] the most likely allowed tokens, at most `count`; ties in order of id."""
    ids = np.flatnonzero(allowed)
    own = logprobs[ids]
    if len(ids) > count:
        kept = own >= np.partition(own, len(own) - count)[len(own) - count]
        ids, own = ids[kept], own[kept]
    found: np.ndarray = ids[np.argsort(-own, kind="stable")][:count]
    return found


def _logprobs(view: View, place: int, size: int) -> np.ndarray:
    """[size] log-probabilities of a position, uniform where the pass did not compute it."""
    row = int(np.searchsorted(view.positions, place))
    if row < len(view) and view.positions[row] == place:
        found: np.ndarray = view.logprobs[row, :size].double().cpu().numpy()
        return found
    return np.zeros(size)
