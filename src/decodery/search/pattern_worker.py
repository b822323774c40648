"""Regular expressions in a process of their own: what takes too long is ended. See `core.worker_pool`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable


def begin() -> Callable[[tuple[str, list[str]]], list[str | None]]:
    return _found


def _found(question: tuple[str, list[str]]) -> list[str | None]:
    pattern, texts = question
    compiled = re.compile(pattern)
    return [_last(compiled, text) for text in texts]


def _last(compiled: re.Pattern[str], text: str) -> str | None:
    last = deque(compiled.finditer(text), maxlen=1)
    if not last:
        return None
    return last[0][1] if compiled.groups else last[0][0]
