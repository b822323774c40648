"""Connections over which no request comes are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""For the line and the headers of a request, from the beginning of a connection or their first byte."""
HEADER_BYTES = 64 << 10
"""At most of a line and headers."""


class TimedProtocol(H11Protocol):
    """Uvicorn's protocol, with a limit of the time that headers take. Between requests keep-alive's holds.

    It is the one of h11, also where httptools is installed, which takes headers without a limit.
    """

    header_seconds = HEADER_SECONDS
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
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
