"""One stage: so many requests at one rate, or by so many clients at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import httpx

from decodery.core.errors import DecoderyError

from .arrivals import Arrival
from .client import Client, Seen
from .settings import LoadSettings

_LOOKS_EVERY = 0.1

Report = Callable[[int], None]


class StoppedError(Exception):
    """The user wants no more."""


async def stage(
    url: str,
    asked: Sequence[Arrival],
    settings: LoadSettings,
    *,
    clients: int | None,
    report: Report = lambda done: None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[list[Seen], float]:
    """What clients saw of each request, and the seconds until none was left to come.

    clients: so many send one request after the other; None: requests come when they are due, whoever still waits.
    Raises StoppedError, and DecoderyError where no server is found.
    """
    async with _http(url) as http:
        model = await _model(http, url)
        zero = monotonic()
        client, seen = Client(http, model, settings, zero), list[Seen]()
        last = 0.0
        turns = None if clients is None else asyncio.Semaphore(clients)

        async def one(number: int, arrival: Arrival) -> None:
            nonlocal last
            at = arrival.at
            if turns is not None:
                await turns.acquire()
                at = monotonic() - zero
            else:
                await asyncio.sleep(max(0.0, zero + at - monotonic()))
            last = max(last, at)
            try:
                seen.append(await client.ask(arrival, number, at))
            finally:
                if turns is not None:
                    turns.release()
            report(len(seen))

        everyone = asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(asked)))
        try:
            while not everyone.done():
                await asyncio.wait({everyone}, timeout=_LOOKS_EVERY)
                if stopped():
                    raise StoppedError
            everyone.result()
        finally:
            everyone.cancel()
            await asyncio.gather(everyone, return_exceptions=True)
        # Where all come at once there is no time in which more were to come.
        whole = max(each.end for each in seen)
        at_once = last == 0 if clients is None else len(asked) <= clients
        return seen, whole if at_once else min(last, whole)


@asynccontextmanager
async def _http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    # Patience is the client's own, and every request has a connection: a queue here would hide the server's.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(None, connect=10), limits=limits) as http:
        yield http


async def _model(http: httpx.AsyncClient, url: str) -> str:
    """What a server calls its model."""
    try:
        found = (await http.get("/v1/models", timeout=10)).raise_for_status().json()
        return str(found["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise DecoderyError(f"no server with a model answers at {url}/v1/models: {error}") from error
