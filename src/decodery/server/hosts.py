"""Under which names a server is reached, and which pages in browsers may use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decodery.core.errors import SettingsError

from .errors import ApiError

_NAME, _ORIGIN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*"), re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+")


def is_local(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_hosts(names: Sequence[str]) -> None:
    """Raise SettingsError for what no request can be sent to: a name with a port, a scheme or a path."""
    for name in names:
        if name != "*" and not _is_address(name) and not _NAME.fullmatch(name.lower()):
            raise SettingsError(
                f"--allow-host takes a name or an address without port and path, '*.example.org' or '*', not {name!r}"
            )


def require_origins(origins: Sequence[str]) -> None:
    """Raise SettingsError for what no browser sends as the origin of a page."""
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise SettingsError(f"--allow-origin takes https://example.org without a path, or '*', not {origin!r}")


class AllowedHosts:
    """Refuses requests to other names, such as that of a page which resolves to this machine.

    Args:
        app: What comes next.
        names: Names, addresses, and `*.example.org` for all names below one.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = [name.lower().removeprefix("[").removesuffix("]") for name in names]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._allowed(
            name := _name(Headers(scope=scope).get("host"))
        ):
            advice = f"reach it by another name, or start it with --allow-host {name[:100] or 'NAME'}"
            error = ApiError(400, f"this server does not answer as {name[:100]!r}: {advice}", code="host_not_allowed")
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, name: str) -> bool:
        return any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in self._names)


def _name(header: str | None) -> str:
    """The name in a `Host` header; "" where there is none in it."""
    if header is None or re.search(r"[/?#@\\\s]", header):
        return ""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
