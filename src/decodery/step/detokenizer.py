"""Text of a growing token sequence: never a cut character, never a piece of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Protocol


class Detokenizer(Protocol):
    """Turns token ids into text piece by piece; the pieces join to the decoded whole.

    `copy.copy` gives one that goes on from the same place apart.
    """

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TextStream:
    """Decodes committed tokens, ends at the first stop string and releases text that is safe to show.

    Text that could be the beginning of a stop string is held back until it is settled, and so is that of the last `lag`
    tokens, which may be taken back.

    Args:
        detokenizer: What turns ids into text.
        stop: Stop strings.
        lag: Tokens at the end that may be taken back.
        stop_tokens: By id the stop strings that are tokens which no text shows.
        lazy: Whether no text can end the stream, so that tokens are decoded when the text is read.
        waiting: Tokens that are not decoded yet.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str] = (),
        lag: int = 0,
        *,
        stop_tokens: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer, self._stop_tokens = detokenizer, stop_tokens or {}
        self.stop = tuple(stop)
        self._longest = max((len(string) for string in stop), default=0)
        self._released = 0
        self._text = ""
        self._ends = deque([0], maxlen=lag + 1)
        # Without stop strings the text is not needed before it is read.
        self.lazy = not stop and lag == 0 and not self._stop_tokens
        self.waiting: list[int] = []

    @property
    def text(self) -> str:
        """The text so far, cut before the stop string that ended it."""
        self._decode()
        return self._text

    def replace(self, text: str) -> None:
        """Show another text in the place of the one so far."""
        self._decode()
        self._text = text

    def push(self, token: int) -> str | None:
        """Add one token; returns the stop string that its text completed, if any, and cuts the text before it."""
        if self.lazy:
            self.waiting.append(token)
            return None
        found = self._append(self._detokenizer.push([token]))
        if found is None and token in self._stop_tokens:
            found = self.finish() or self._stop_tokens[token]
        self._ends.append(len(self.text))
        return found

    def finish(self) -> str | None:
        """No token will follow: what was held back is text after all.

        Returns:
            A stop string that it completed, if any.
        """
        self._decode()
        return self._append(self._detokenizer.finish())

    def fork(self, released: TextStream | None = None) -> TextStream:
        """The same text, to be continued apart.

        Args:
            released: What has shown all that was safe of it so far.
        """
        self._decode()
        clone = copy(self)
        clone.waiting = []
        clone._detokenizer, clone._ends = copy(self._detokenizer), self._ends.copy()
        clone._released = (released or self)._released
        return clone

    def release(self, *, final: bool = False) -> str:
        """Text that became safe to show since the last call."""
        safe = self.text if final else self.safe
        piece = safe[self._released :]
        self._released = max(self._released, len(safe))
        return piece

    @property
    def safe(self) -> str:
        """What of the text will stay whatever follows."""
        text = self.text
        return text[: min(len(text) - self._held_back(), self._ends[0])]

    def _decode(self) -> None:
        """Decode the tokens that wait for it."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self._append(self._detokenizer.push(waiting))
            self._ends.append(len(self._text))

    def _append(self, piece: str) -> str | None:
        start = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        found = [(at, string) for string in self.stop if (at := self._text.find(string, start)) >= 0]
        if not found:
            return None
        at, string = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self._text = self._text[:at]
        return string

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins some stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(string.startswith(end) for string in self.stop):
                return length
        return 0
