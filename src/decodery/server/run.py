"""A server from its start to its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.routing import BaseRoute

from decodery.core.errors import DecoderyError
from decodery.llm.llm import LLM

from .app import Front
from .connections import HEADER_BYTES, TimedProtocol
from .served import ModelSource
from .settings import ServerSettings

_LOOKS_EVERY = 0.1
_LAST_WORDS = 5
"""Seconds for what is written already to reach its readers."""


class EngineFailed(DecoderyError):
    """The engine's thread ended by an error that no request can cause."""


class Server(uvicorn.Server):
    """Takes requests until a signal comes.

    Then lets what is in progress end, for so long as the settings say. A second signal ends it at once.

    Args:
        lm: The model.
        settings: Limits, names and keys.
        more, size: Further models, see `Front`.
        host, port: Where it listens; port 0 takes a free one.
        routes: Further routes.
        tls: Files of a certificate and its key.
        on_ready: Called with the address.
    """

    def __init__(
        self,
        lm: LLM,
        settings: ServerSettings,
        more: Sequence[ModelSource] = (),
        size: int = 0,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        routes: Sequence[BaseRoute] = (),
        tls: tuple[Path, Path] | None = None,
        on_ready: Callable[[str], None] = lambda url: None,
    ) -> None:
        self.front = Front(lm, settings, more, size)
        config = uvicorn.Config(
            self.front.app(routes, host),
            host=host,
            port=port,
            http=TimedProtocol,
            h11_max_incomplete_event_size=HEADER_BYTES,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            ssl_certfile=None if tls is None else str(tls[0]),
            ssl_keyfile=None if tls is None else str(tls[1]),
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.front.service.on_failure = self._fail
        self.front.service.start()
        await super().startup(sockets)
        if self.started:
            self._on_ready(self.url)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        # Whoever waits still hears that the server stops.
        await asyncio.get_running_loop().run_in_executor(None, self.front.models.stop)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._signals += 1
        if self._signals > 1:
            self.should_exit = self.force_exit = True
        elif self._loop is not None:
            self.front.models.drain()
            self._loop.call_soon_threadsafe(self._begin_drain)

    def stop(self) -> None:
        """As a signal would, from any thread."""
        self.handle_exit(0, None)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        until = asyncio.get_running_loop().time() + self.front.settings.drain_seconds
        while not self.front.models.idle and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOKS_EVERY)
        self.should_exit = True

    def _fail(self, error: BaseException) -> None:
        """On the engine's thread: it ended by an error."""
        print(f"decodery: the engine failed ({type(error).__name__}: {error}); the server ends", file=sys.stderr)
        self.should_exit = True


def serve(server: Server) -> None:
    """Run a server to its end.

    Raises:
        EngineFailed: If its engine was what ended it.
    """
    server.run()
    failure = server.front.service.failure
    if failure is not None:
        raise EngineFailed(f"the engine failed: {type(failure).__name__}: {failure}") from failure
