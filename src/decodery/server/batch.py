"""Files of requests answered by the code that answers a server's requests, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .app import Front
from .batch_file import BatchFile, BatchRequest
from .errors import ApiError, as_api_error, invalid
from .fields import ChatRequest, CompletionRequest
from .keys import NOBODY
from .run import EngineFailed
from .wire import checked

KINDS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_LOOKS_EVERY = 0.2


async def respond(front: Front, url: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer, as a client of the server would get them. Raises EngineFailed."""
    try:
        kind = KINDS.get(url)
        if kind is None:
            raise ApiError(404, f"there is no {url[:80]!r} here: a batch has {' and '.join(KINDS)}", param="url")
        request = checked(body, kind, strict=front.settings.strict)
        if request.stream:
            raise invalid("a batch has no streams", "stream")
        return 200, await front.answer(request, NOBODY)
    except Exception as error:
        if not front.service.alive:
            raise EngineFailed("the engine ended: what it has answered is kept") from error
        failed = as_api_error(error)
        return failed.status, failed.body


async def answer_batch(
    front: Front, batch: BatchFile, at_once: int, report: Callable[[int, int], None], stopped: Callable[[], bool]
) -> None:
    """Answer all requests, or until `stopped`: what is in progress then is left for the next run.

    Args:
        front: Of a service that has been started.
        at_once: Requests in progress at a time.
        report: Hears how many lines are done and how many there are.

    Raises:
        DecoderyError: If a file cannot be read or written, EngineFailed where the engine ends.
    """

    async def answer(request: BatchRequest) -> None:
        batch.add(request, *await respond(front, request.url, request.body))

    requests = batch.unanswered()
    pending, over = set[asyncio.Task[None]](), set[asyncio.Task[None]]()
    try:
        while not stopped():
            while len(pending) < at_once and (each := next(requests, None)) is not None:
                pending.add(asyncio.create_task(answer(each)))
            report(batch.over, batch.totals.total)
            if not pending:
                batch.totals.complete = True
                break
            over, pending = await asyncio.wait(pending, timeout=_LOOKS_EVERY, return_when=asyncio.FIRST_COMPLETED)
            for task in over:
                task.result()
    finally:
        for task in pending:
            task.cancel()
        # Of several that failed together one has been raised.
        await asyncio.gather(*pending, *over, return_exceptions=True)
