"""How many rows of a prompt fit into a pass that others wait for, by what the passes before it took."""

from __future__ import annotations

from math import inf, sqrt

LEAST_ROWS = 16
"""Of a prompt in a pass, whatever they take: reading goes on always, and fewer rows cost as much as these."""
_FORGET = 0.9


class Pace:
    """Seconds per row as a line over the tokens attended to, fitted to the latest prefill passes.

    Before the first of them nothing is known, and everything fits.
    """

    def __init__(self) -> None:
        self._row = self._token = 0.0
        # Of the least squares, every row an observation: rows, tokens, tokens * tokens, seconds and tokens * seconds.
        self._sums = [0.0] * 5

    def learn(self, rows: int, attended: int, seconds: float) -> None:
        """A pass took so long.

        Args:
            attended: Tokens that its rows attend to, of all rows together.
        """
        tokens = attended / rows
        news = (rows, attended, attended * tokens, seconds, tokens * seconds)
        self._sums = [_FORGET * old + new for old, new in zip(self._sums, news, strict=True)]
        n, x, xx, y, xy = self._sums
        width = n * xx - x * x
        # Passes over equally long texts tell nothing of other lengths; neither part can be negative.
        self._token = max(0.0, (n * xy - x * y) / width) if width > 1e-6 * n * xx else 0.0
        self._row = (y - self._token * x) / n
        if self._row < 0:
            self._row, self._token = 0.0, xy / xx

    def seconds(self, rows: int, before: int) -> float:
        """What `rows` further rows of a text take of a pass, after `before` tokens."""
        return rows * (self._row + self._token * (before + rows / 2))

    def rows(self, seconds: float, before: int) -> float:
        """How many rows after `before` tokens take so long; infinitely many where nothing is known."""
        each = self._row + self._token * before
        if seconds <= 0 or seconds == inf or not each + self._token:
            return inf if seconds > 0 else 0.0
        return 2 * seconds / (each + sqrt(each * each + 2 * self._token * seconds))
