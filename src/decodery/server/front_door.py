"""What every request passes before its route: allowed hosts and origins, a request id, and a line in the access log."""

from __future__ import annotations

import json
import logging
import uuid
from time import monotonic
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import as_api_error
from .hosts import AllowedHosts, is_local
from .settings import ServerSettings
from .translated import written_error
from .wire import Json

_LOG = logging.getLogger("decodery.server.access")


def middleware(settings: ServerSettings, host: str) -> list[Middleware]:
    """What stands before the routes.

    Args:
        settings: The server's.
        host: Where it listens. On a local address only local names reach it unless `settings.hosts` says otherwise.
    """
    found = [Middleware(AccessLog)]
    hosts = list(settings.hosts) or (["localhost", "127.0.0.1", "[::1]", host] if is_local(host) else [])
    if hosts and "*" not in hosts:
        found.append(Middleware(AllowedHosts, names=hosts))
    if settings.origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "warning", "retry-after"],
            )
        )
    return found


class AccessLog:
    """Gives every request an id, and writes a line of JSON for each, without what was asked or answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, begin, status = uuid.uuid4().hex, monotonic(), 0

        async def answered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode("ascii"))]
            await send(message)

        try:
            await self._app(scope, receive, answered)
        except Exception as error:
            if not status:
                failed = as_api_error(error)
                await Json(written_error(scope["path"], failed), failed.status)(scope, receive, answered)
            raise
        finally:
            line: dict[str, Any] = {"request_id": name, "method": scope["method"], "path": scope["path"]}
            client = scope.get("client")
            line |= {"status": status, "seconds": round(monotonic() - begin, 4), "client": client and client[0]}
            _LOG.info("%s", json.dumps(line))
