"""Marks around what others wrote in chat messages, by which it is found again in what a template makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .content import Span

_EDGES = re.compile(r"(?s)\S(?:.*\S)?")
"""A text without the white space around it, which many templates take away."""
_PLANES = (0xF0000, 0x100000)
"""Where characters for private use begin, of which marks are made."""
_MOST = 0x7FFE


class Marks:
    """Puts marks into messages and takes them out of a rendered text.

    Args:
        used: All that messages and template say, so that no mark occurs there.
        spelled: Matches control tokens.
        free: False where no characters are left to mark with.
        count: Of the marks that were put in.
    """

    def __init__(self, used: str, spelled: re.Pattern[str] | None) -> None:
        taken = {ord(character) >> 16 for character in set(used)}
        base = next((plane for plane in _PLANES if plane >> 16 not in taken), None)
        self.free = base is not None
        self._base, self._spelled = base or 0, spelled
        self._marked: list[tuple[int | None, bool]] = []

    @property
    def count(self) -> int:
        return len(self._marked)

    def messages(self, messages: Any, *, whole: bool) -> Any:
        """Messages with marks.

        Args:
            whole: Around what they say; otherwise around nothing but spelled control tokens.
        """
        return [self._message(number, message, whole) for number, message in enumerate(messages)]

    def spelled(self, value: Any) -> Any:
        """The same data with marks around every control token that it spells."""
        if isinstance(value, str):
            return value if self._spelled is None else self._spelled.sub(self._wrap(None), value)
        if isinstance(value, dict):
            return {self.spelled(key): self.spelled(item) for key, item in value.items()}
        return [self.spelled(item) for item in value] if isinstance(value, list) else value

    def read(self, text: str) -> tuple[str, list[tuple[int | None, Span]], list[tuple[int | None, bool]]]:
        """A rendered text without its marks.

        Returns:
            The text; what was marked, by the number of its message (None: of no message as a whole) and its characters;
            and of what the template tore apart the message's number and whether it spells a control token.
        """
        parts, size, begun = list[str](), 0, dict[int, int]()
        found: list[tuple[int | None, Span]] = []
        torn = set[int]()
        at, first, last = 0, chr(self._base), chr(self._base + 2 * len(self._marked) + 1)
        for mark in re.finditer(f"[{first}-{last}]", text):
            parts.append(text[at : mark.start()])
            size, at = size + mark.start() - at, mark.end()
            number, closes = divmod(ord(mark[0]) - self._base, 2)
            if not closes and number not in begun:
                begun[number] = size
            elif closes and number in begun:
                found.append((self._marked[number][0], (begun.pop(number), size)))
            else:
                torn.add(number)
        torn |= set(begun)
        return "".join([*parts, text[at:]]), found, [self._marked[number] for number in torn]

    def _message(self, number: int, message: Any, whole: bool) -> Any:
        if not isinstance(message, dict) or not whole:
            return self.spelled(message)
        found = {}
        for key, item in message.items():
            if key == "content" and isinstance(item, str):
                item = _EDGES.sub(self._wrap(number), item, count=1)
            elif key == "content" and isinstance(item, list):
                item = [self._part(number, part) for part in item]
            else:
                key, item = self.spelled(key), self.spelled(item)
            found[key] = item
        return found

    def _part(self, number: int, part: Any) -> Any:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return self.spelled(part)
        return {
            key: _EDGES.sub(self._wrap(number), item, count=1) if key == "text" else self.spelled(item)
            for key, item in part.items()
        }

    def _wrap(self, message: int | None) -> Callable[[re.Match[str]], str]:
        def wrap(match: re.Match[str]) -> str:
            if len(self._marked) == _MOST:
                self.free = False
                return match[0]
            first = self._base + 2 * len(self._marked)
            self._marked.append((message, self._spelled is not None and bool(self._spelled.search(match[0]))))
            return f"{chr(first)}{match[0]}{chr(first + 1)}"

        return wrap
