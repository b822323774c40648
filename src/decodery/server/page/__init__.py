"""The page at `/`: plain files that the browser runs as they are, and that reach no other host."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """One route per file, all of them read now; the page itself is at `/`."""
    files = {path.name: path for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}
    return [
        Route("/" if name == "index.html" else f"/page/{name}", partial(_file, _answer(path)))
        for name, path in files.items()
    ]


def _answer(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=_KINDS[path.suffix], headers=_HEADERS)


async def _file(answer: Response, request: Request) -> Response:
    return answer
