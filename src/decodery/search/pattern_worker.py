"""Regular expressions in a process of their own: what takes too long is ended. See `core.worker_pool`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

_Question = tuple[str, list[str]] | tuple[str, list[str], bool]
"""A pattern, texts, and whether the whole match counts where the pattern has groups."""


def begin() -> Callable[[_Question], list[str | None]]:
    return _found


def _found(question: _Question) -> list[str | None]:
    pattern, texts, *whole = question
    compiled = re.compile(pattern)
    return [_last(compiled, text, any(whole)) for text in texts]


def _last(compiled: re.Pattern[str], text: str, whole: bool) -> str | None:
    last = deque(compiled.finditer(text), maxlen=1)
    if not last:
        return None
    return last[0][1] if compiled.groups and not whole else last[0][0]
