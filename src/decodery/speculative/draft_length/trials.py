"""Whether texts that share passes get on faster with drafts: both are tried in turns, and the clock decides."""

from __future__ import annotations

_TRIAL, _LONG, _LONGEST = 8, 32, 256
"""Steps that the slower way is tried for, and that the faster one is kept for: at first, and when it stays so."""
_FORGET = 0.5
"""What older steps count for after a turn of the same way."""
_DISTURBED = 2.0
"""A step counts as so many times the mean at most: somebody may have read a prompt in it."""


class Trials:
    """Tokens per second with drafts and without, by how many texts take part.

    What passes cost was measured without any drafter, and of a pass that many texts share nobody can tell whose drafts
    took how long. So for some steps nobody drafts, and what guessing, feeding and choosing take together shows. The
    number of texts counts by its magnitude: they leave one by one.
    """

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}

    def drafts(self, texts: int) -> bool:
        """Whether texts draft in this step, of which so many take part."""
        return self._turn(texts).drafting

    def learn(self, texts: int, drafted: bool, seconds: float, tokens: int) -> None:
        """Record one text's part in a step: the step's time and the text's tokens.

        In the step texts drafted or did not.
        """
        self._turn(texts).learn(1 / texts, drafted, seconds, tokens)

    def _turn(self, texts: int) -> _Turn:
        return self._turns.setdefault(texts.bit_length(), _Turn())


class _Turn:
    """Which way it goes now, for how many steps still, and what is known of both; places are `drafting`."""

    def __init__(self) -> None:
        self.drafting = True
        self._left, self._length, self._faster, self._long = float(_TRIAL), 0, True, False
        self._steps, self._seconds, self._tokens = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]

    def learn(self, share: float, drafted: bool, seconds: float, tokens: int) -> None:
        if (steps := self._steps[drafted]) >= 1:
            seconds = min(seconds, _DISTURBED * self._seconds[drafted] / steps)
        self._steps[drafted] += share
        self._seconds[drafted] += share * seconds
        self._tokens[drafted] += tokens
        if drafted == self.drafting:
            self._left -= share
            # Shares of 1 / 3 do not add up to 1 in the last bit.
            if self._left < share / 2:
                self._next()

    def _next(self) -> None:
        """After a long turn, and the very first one, comes a trial of the other way; after a trial the faster one."""
        now, other = self.drafting, not self.drafting
        if self._steps[other] and not self._long:
            drafting, without = (self._tokens[way] / self._seconds[way] for way in (True, False))
            faster = drafting > without
            self._length = min(2 * self._length, _LONGEST) if faster == self._faster and self._length else _LONG
            self._faster = self.drafting = faster
            self._left, self._long = float(self._length), True
        else:
            self.drafting, self._left, self._long = other, float(_TRIAL), False
        if self.drafting != now:
            for known in (self._steps, self._seconds, self._tokens):
                known[self.drafting] *= _FORGET
