"""The forms that other services give to chats: their requests become ours, and our answers theirs."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any

from decodery.core.abstract import Contract


class Dialect(Contract):
    """How an answer is written down.

    Attributes:
        media_type: Of a stream.
    """

    media_type: str = "text/event-stream"

    @abstractmethod
    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A whole answer, from that of a chat completion."""

    @abstractmethod
    def stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """The bytes of a stream, from the chunks of a chat completion; one with "error" is the last."""


class OpenAI(Dialect):
    """The form that answers have anyway: events without names, and a mark at the end."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        return answer

    async def stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield event(chunk)
            if "error" in chunk:
                return
        yield b"data: [DONE]\n\n"


class Rewritten(OpenAI):
    """An answer in a form of its own, which is never a stream.

    Args:
        whole: Makes it from an answer with `choices` and `usage`.
    """

    def __init__(self, whole: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._whole = whole

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        return self._whole(answer)


def dumps(content: Any) -> bytes:
    """JSON in ASCII, so that half a character in a text cannot break it."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def event(content: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + dumps(content) + b"\n\n"
