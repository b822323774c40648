"""Connections over which no request comes are closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 20.0
"""For the line and the headers of a request, from the beginning of a connection or their first byte."""
HEADER_BYTES = 64 << 10
"""At most of a line and headers; httptools, which uvicorn takes where it is installed, has no limit of its own."""

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol


class TimedProtocol(Protocol):
    """Uvicorn's protocol, which waits for headers only so long and takes only so many.

    Between requests its keep-alive time holds.
    """

    header_seconds = HEADER_SECONDS
    header_bytes = HEADER_BYTES
    _timer: asyncio.TimerHandle | None = None
    _unanswered = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._unanswered = 0 if self._answers else self._unanswered + len(data)
        if self._unanswered > self.header_bytes:
            self.transport.close()
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _answers(self) -> bool:
        """Whether a request has come whose answer is not over."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        """Let time run while there is no request."""
        if self._answers:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if not self._answers:
            self.transport.close()
