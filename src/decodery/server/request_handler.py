"""One request and its answer, whole or as a stream, over the network or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from . import answer
from .errors import as_api_error
from .job import FinishedText, Job, Mailbox, Update
from .plan import Plan
from .service import Service


class RequestHandler:
    """Runs the plan of one request.

    Construct it, call `open`, then `whole` or `stream`, and always `close`, which cancels what is not finished.

    Args:
        service: The engine's thread.
        plan: What is requested.
        owner: The key of the client: texts of one owner share a queue and prompts.
        arrived: When the request came, in seconds of a monotonic clock; now by default.
    """

    def __init__(self, service: Service, plan: Plan, owner: str, arrived: float | None = None) -> None:
        self._service, self._plan = service, plan
        self._mailbox = Mailbox()
        self._pending: list[Update] = []
        self._found: dict[Job, list[FinishedText]] = {}
        self._head = {"id": f"{plan.form.prefix}{uuid.uuid4().hex}", "created": int(time.time())}
        self._head |= {"model": service.settings.name, "system_fingerprint": service.fingerprint}
        arrived, first = monotonic() if arrived is None else arrived, None
        deadline = arrived + service.settings.seconds
        self._jobs: list[Job] = []
        for number, request in enumerate(plan.requests):
            request.cache_namespace = owner
            each = 1 if plan.search is not None else plan.n
            first = None if number % each == 0 else self._jobs[number - number % each]
            index = number * plan.n if plan.search is not None else number
            job = Job(request, owner, self._mailbox, deadline, index, first, plan.search, plan.models, arrived=arrived)
            self._jobs.append(job)

    async def open(self) -> None:
        """Submit the texts and wait for the first sign of life.

        Raises:
            ApiError: If the request cannot be served.
        """
        self._service.submit(self._jobs)
        self._pending = await self._mailbox.take()
        for news in self._pending:
            if isinstance(news.end, BaseException):
                raise as_api_error(news.end) from news.end

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises ApiError."""
        async for news in self._news():
            if isinstance(news.end, BaseException):
                raise as_api_error(news.end) from news.end
        form = self._plan.form
        choices = [form.choice(index, text) for index, text in self._choices()]
        return {**self._head, "object": form.whole, "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as chunks; where a text ends by an error, that is the last one."""
        form, totals = self._plan.form, {"usage": None} if self._plan.include_usage else {}

        def chunks(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
            head = {**self._head, "object": form.chunk}
            return [{**head, "choices": [choice], **totals} for choice in choices]

        shown = dict[int, int]()
        indices = [index + number for index in self._indices for number in range(self._texts_per_job)]
        for index in indices:
            for chunk in chunks(form.opening(index)):
                yield chunk
        async for news in self._news():
            if isinstance(news.end, BaseException):
                yield as_api_error(news.end).body
                return
            if news.end is None:
                made = form.grown(news.job.index, news)
                shown[news.job.index] = shown.get(news.job.index, 0) + len(news.text)
            elif self._plan.search is None:
                made = form.ended(news.job.index, news, form.of(news.end[0]))
            else:
                made = [
                    choice
                    for number, text in enumerate(news.end[: self._plan.n])
                    for choice in form.ended(
                        news.job.index + number,
                        Update(
                            news.job,
                            text.text[shown.get(news.job.index + number, 0) :],
                            text.tokens,
                            text.logprobs,
                            branches=news.branches if number == 0 else [],
                        ),
                        text,
                    )
                ]
            for chunk in chunks(made):
                yield chunk
        if self._plan.include_usage:
            yield {**self._head, "object": form.chunk, "choices": [], "usage": self._usage()}

    def close(self) -> None:
        """Cancel what is not over."""
        self._service.cancel([job for job in self._jobs if job not in self._found])

    @property
    def _indices(self) -> list[int]:
        return [job.index for job in self._jobs]

    @property
    def _texts_per_job(self) -> int:
        return self._plan.n if self._plan.search is not None else 1

    async def _news(self) -> AsyncIterator[Update]:
        """What comes until all jobs are over, or one has failed."""
        while True:
            for news in self._pending:
                if news.end is not None and not isinstance(news.end, BaseException):
                    self._found[news.job] = news.end
                yield news
                if isinstance(news.end, BaseException):
                    return
            if len(self._found) == len(self._jobs):
                return
            self._pending = await self._mailbox.take()

    def _choices(self) -> list[tuple[int, FinishedText]]:
        return [
            (job.index + number, self._plan.form.of(text))
            for job in self._jobs
            for number, text in enumerate(self._found[job][: self._plan.n])
        ]

    def _usage(self) -> dict[str, Any]:
        each = self._texts_per_job if self._plan.search is not None else self._plan.n
        firsts = self._jobs if self._plan.search is not None else self._jobs[::each]
        prompts = [len(job.request.prompt) for job in firsts]
        cached = sum(text.cached for job in firsts for text in self._found[job][:1])
        texts = [text for _, text in self._choices()]
        return answer.usage(prompts, cached, texts, sum(map(self._plan.form.reasoning_tokens, texts)))
