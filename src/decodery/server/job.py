"""One text that a client waits for, and what the engine's thread tells of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal

from decodery.core.trace import Grown, Step, Trace
from decodery.diffusion.texts import Fill, Filling
from decodery.engine.monitoring import monitor_reports
from decodery.engine.request import Request
from decodery.engine.task import CoroutineTask
from decodery.search.base import Search
from decodery.step.monitor import MonitorReport
from decodery.step.sequence import Sequence, TokenLogprob

from .reading import Reading

Ended = Literal["stop", "length", "content_filter", "cancelled", "error"]


@dataclass(eq=False)
class Job:
    """A text, a canvas or a search, from its arrival to its end.

    Attributes:
        owner: Whose it is.
        index: Of the choice it becomes.
        like: Another one with the same prompt, whose prefill it shares.
        models: That read its texts: the server's, and those that draft.
        task: Its part in the engine, while it has one.
        filling: The canvas that is.
        known: Of a search, as much of its first text as cannot change any more.
        trace: Of a search that grows a tree of parts.
        sent, steps: Tokens (of a search characters) and steps already sent.
        arrived, begun, first, last: When it came, got its first pass, its first token and its last one, in seconds of a
            monotonic clock.
        late: It ran out of time.
        over: Nothing more will be sent it.
    """

    request: Request | Fill | Reading
    owner: str
    mailbox: Mailbox
    deadline: float
    index: int = 0
    like: Job | None = None
    search: Search | None = None
    models: int = 1
    task: Sequence | CoroutineTask[Any] | None = None
    filling: Filling | None = None
    known: str = ""
    trace: Trace | None = None
    sent: int = 0
    steps: int = 0
    last: float = 0.0
    arrived: float = field(default_factory=monotonic)
    begun: float | None = None
    first: float | None = None
    late: bool = False
    over: bool = False
    _branches: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    _cells: list[int] = field(default_factory=list)

    @property
    def texts(self) -> int:
        """How many texts it counts as: those of its search, once for each model that reads them."""
        return self.models * (1 if self.search is None else self.search.texts_at_once)

    def settle(self, text: str) -> None:
        """A search knows so much of its first text."""
        self.known = text

    def follow(self, trace: Trace) -> None:
        """A search grows its parts in this trace."""
        self.trace = trace

    def branches(self) -> list[tuple[int, Grown]]:
        """Number and part of what a search has written or scored since the last call."""
        found = []
        for number, part in enumerate([] if self.trace is None else self.trace.grown):
            state = len(part.tokens), part.score
            if part.tokens and self._branches.get(number) != state:
                self._branches[number] = state
                found.append((number, replace(part)))
        return found

    def cells(self) -> list[tuple[int, int | None]]:
        """Position and token of what of a canvas has changed since the last call; None for one that is open."""
        assert self.filling is not None
        canvas = self.filling.canvas
        now = canvas.tokens[canvas.prompt_length :].tolist()
        before = self._cells or [canvas.mask_id] * len(now)
        self._cells = now
        changed = (at for at, token in enumerate(now) if token != before[at])
        return [(at, None if now[at] == canvas.mask_id else now[at]) for at in changed]


@dataclass(frozen=True, slots=True)
class FinishedText:
    """A text that is over.

    Attributes:
        prompt_logprobs: Of the prompt's tokens but the first, where that was asked for.
        context_full: Whether it ended because the model's context was full.
        stopped_by: The stop string or the token that ended it.
        vector: The numbers of a text that was only read.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]
    reason: Ended
    seed: int
    trace: Trace
    cached: int
    prompt_logprobs: list[TokenLogprob]
    score: float | None = None
    monitors: list[MonitorReport] = field(default_factory=list)
    context_full: bool = False
    stopped_by: int | str | None = None
    vector: Ordered[float] = ()


@dataclass(slots=True)
class Update:
    """What a job grew by.

    Attributes:
        branches: Parts of a search's tree, by number.
        cells: Tokens of a canvas, by position.
        end: All of it once it is over (of a search, all it found), or the error that ended it.
    """

    job: Job
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    branches: list[tuple[int, Grown]] = field(default_factory=list)
    cells: list[tuple[int, int | None]] = field(default_factory=list)
    end: list[FinishedText] | BaseException | None = None


class Mailbox:
    """Where the engine's thread leaves news for one coroutine. A slow reader finds more at a time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._news: list[Update] = []
        self._arrived = asyncio.Event()

    def put(self, news: Update) -> None:
        """On the loop's own thread."""
        self._news.append(news)
        self._arrived.set()

    async def take(self) -> list[Update]:
        """All that has come, once something has."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, []
        return news


def deliver(loop: Any, news: list[Update]) -> None:
    """Leave news on the thread of their loop; they are dropped where that loop has ended."""

    def leave() -> None:
        for each in news:
            each.job.mailbox.put(each)

    try:
        loop.call_soon_threadsafe(leave)
    except RuntimeError:
        return


def written(job: Job, encode: Callable[[str], list[int]]) -> list[FinishedText]:
    """What a job that ended without an error has written; of a search that was stopped what is settled.

    Args:
        job: The text, canvas or search.
        encode: Gives the tokens of a text that is known as a text alone.
    """
    if job.filling is not None:
        return [_canvas(job, job.filling)]
    task = job.task
    if isinstance(job.request, Reading):
        assert isinstance(task, CoroutineTask)
        return [FinishedText("", [], [], "stop", 0, Trace(), 0, [], vector=task.result or ())]
    if isinstance(task, CoroutineTask) and task.stopped and job.known:
        return [FinishedText(job.known, encode(job.known), [], "cancelled", job.request.seed, Trace(), 0, [])]
    found: list[Sequence] = (
        [task] if isinstance(task, Sequence) else list(task.result or ()) if isinstance(task, CoroutineTask) else []
    )
    return [_one(job, seq) for seq in found]


def _one(job: Job, seq: Sequence) -> FinishedText:
    # Before the rest: monitors that wait may still end the text.
    monitors = monitor_reports(seq)
    assert seq.text is not None and seq.finish_reason is not None
    return FinishedText(
        text=seq.text.text,
        tokens=seq.generated,
        logprobs=seq.token_logprobs,
        reason=seq.finish_reason,
        seed=seq.request.seed,
        trace=seq.trace,
        cached=seq.scheduling.cached,
        prompt_logprobs=seq.prompt_token_logprobs,
        score=seq.score,
        monitors=monitors,
        context_full=seq.context_full,
        stopped_by=seq.stopped_by,
    )


def _canvas(job: Job, filling: Filling) -> FinishedText:
    output = filling.output()
    return FinishedText(
        text=output.text,
        tokens=output.tokens,
        logprobs=[],
        reason=output.finish_reason,
        seed=output.seed,
        trace=output.trace,
        cached=0,
        prompt_logprobs=[],
    )
