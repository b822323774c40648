"""HTTP: bodies in, answers out, and an eye on whether the client is still there."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .dialect import Dialect, dumps
from .errors import ApiError, as_api_error, invalid, overloaded
from .fields import Body
from .known_fields import refuse_by_name, refuse_misnamed, unknown_fields
from .request_handler import RequestHandler

T = TypeVar("T")
B = TypeVar("B", bound=Body)

_BODY_SECONDS = 30.0
_MOST_DEPTH = 100
"""Lists and objects of a request in each other: what reads it calls itself for each."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def read(request: Request, kind: type[B], most: int, *, strict: bool) -> B:
    """The body of a request.

    Raises:
        ApiError: For one that is too large, too slow, no JSON or not of this kind, and ClientGone where it does not
            come to its end.
    """
    # Some clients name no type. Pages of other sites, which may send such a request unasked, name their origin.
    unnamed = "" if "origin" in request.headers else "application/json"
    if request.headers.get("content-type", unnamed).partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    if (packed := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(415, f"Content-Encoding {packed[:40]!r} is not read: send the JSON as it is")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise ApiError(413, f"the request is larger than {most} bytes, the most this server takes")
                parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {_BODY_SECONDS:.0f} s") from None
    try:
        found = loads(b"".join(parts))
    except RecursionError:
        raise invalid("the request is nested too deep") from None
    except ValueError as error:
        raise invalid(f"the request is not JSON: {error}") from None
    return checked(found, kind, strict=strict)


def loads(data: bytes | str) -> Any:
    """JSON as strict as its standard.

    Raises ValueError, also for numbers beyond floats, and RecursionError for what is nested too deep.
    """
    try:
        found = json.loads(data, parse_constant=_no_number, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("an integer in it has too many digits") from None
        raise
    level, depth = [found], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > _MOST_DEPTH:
            raise RecursionError(f"lists and objects lie in more than {_MOST_DEPTH} others")
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return found


def checked(found: Any, kind: type[B], *, strict: bool) -> B:
    """A request from what its JSON says.

    Raises:
        ApiError: For what is none of this kind.
    """
    if not isinstance(found, dict):
        raise invalid("the request is not a JSON object")
    refuse_by_name(found, kind)
    refuse_misnamed(found, kind)
    try:
        body = kind.model_validate(found)
    except RecursionError:
        raise invalid("the request is nested too deep") from None
    except Exception as error:
        raise as_api_error(error) from None
    unknown = unknown_fields(found, body)
    if strict and unknown:
        raise invalid(f"there is no field {unknown[0][:80]!r}", unknown[0][:80])
    body.ignore(unknown)
    return body


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    if math.isinf(found := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return found


async def watched(receive: Receive, work: Awaitable[T]) -> T:
    """Do something for a client. Raises ClientGone, and leaves the work, as soon as it has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def prepared(request: Request, work: Awaitable[T], seconds: float) -> T:
    """What a request needs before it reaches the engine, such as its plan, while its client waits.

    Raises:
        ApiError: If it takes longer than a request may, and ClientGone where nobody waits any more.
    """
    try:
        async with asyncio.timeout(seconds):
            return await watched(request.receive, work)
    except TimeoutError:
        raise overloaded("this request has waited for all the time it may take") from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    request: Request, handler: RequestHandler, dialect: Dialect, ignored: Sequence[str], *, stream: bool, seconds: float
) -> Response:
    """The answer of a request, which ends with it.

    Args:
        request: The request.
        handler: Makes the answer.
        dialect: The form of the answer.
        ignored: Fields of the request that were not read, for a header.
        stream: Whether the answer is a stream.
        seconds: That a slow reader may take for a stream.
    """
    headers = _warning(ignored)
    streams = False
    try:
        if not stream:

            async def whole() -> dict[str, Any]:
                await handler.open()
                return dialect.whole(await handler.whole())

            return Json(await watched(request.receive, whole()), headers=headers)
        await watched(request.receive, handler.open())
        streams = True
        return _EventStream(handler, dialect, seconds, headers)
    finally:
        if not streams:
            handler.close()


_MOST_NAMED = 20
"""Fields that the header names."""


def _warning(ignored: Sequence[str]) -> dict[str, str]:
    """The header about fields that were not read."""
    if not ignored:
        return {}
    names = ", ".join(re.sub(r"[^\w.-]", "?", name[:80], flags=re.ASCII) for name in ignored[:_MOST_NAMED])
    return {"Warning": f'299 decodery "ignored fields: {names}"'}


class Json(JSONResponse):
    """JSON in ASCII, so that half a character in a text cannot break it."""

    def render(self, content: Any) -> bytes:
        return dumps(content)


class _EventStream(Response):
    """A stream in the form of a dialect."""

    def __init__(self, handler: RequestHandler, dialect: Dialect, seconds: float, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type=dialect.media_type)
        self._dialect = dialect
        self._handler, self._seconds = handler, seconds
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await watched(receive, self._write(send))
        except (ClientGone, TimeoutError, OSError):
            pass
        finally:
            self._handler.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._dialect.stream(self._handler.stream()):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
