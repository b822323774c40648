"""The engine's thread: it takes jobs, runs passes over those in progress, and notifies all that wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from decodery.core.version import __version__
from decodery.diffusion.texts import Fill
from decodery.engine.engine import Engine
from decodery.engine.prefixes import PrefixCache
from decodery.engine.schedule import Limits
from decodery.llm.llm import LLM
from decodery.step.sequence import Sequence as Text

from .admission import OWNER_PART, Admission
from .errors import ApiError, invalid, log_failure, overloaded, stopping
from .fair import FairQueue
from .job import FinishedText, Job, Update, deliver, written
from .load import ServerLoad
from .metrics import Metrics
from .reading import Reading
from .settings import ServerSettings


def fingerprint(lm: LLM) -> str:
    """What decides a text beside its request: this version, the model and its precision."""
    return f"decodery-{__version__}-{lm.dtype}-{lm.model.fingerprint[:12]}"


class Service:
    """Decodes jobs of many owners with one engine on a thread of its own; knows nothing of the network.

    `submit` and `cancel` may be called on any thread.

    Args:
        admission: Counts the texts of all models.
        fingerprint: What decides a text beside its request: this version, the model and its precision.
        failure: What ended the thread, where something did, which no job can cause; `on_failure` then hears of it.
        load: As it was after the last pass.
    """

    def __init__(self, lm: LLM, settings: ServerSettings, metrics: Metrics, admission: Admission) -> None:
        self.lm = lm
        self.settings = settings
        self.fingerprint = fingerprint(lm)
        self.metrics = metrics
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.draining = False
        self._prefixes = PrefixCache(settings.kv_bytes)
        self._owner_part = OWNER_PART if len(settings.keys) > 1 else 1.0
        self._engine = Engine(
            lm.model,
            detokenizer=lm.tokenizer.stream,
            memory=lm.memory,
            prefill_chunk=settings.chunk,
            limits=Limits(
                settings.rows,
                settings.max_running,
                settings.kv_bytes,
                settings.pass_seconds,
                branches=settings.max_texts,
                side_seconds=settings.side_seconds,
                owner_part=self._owner_part,
            ),
            prefixes=self._prefixes,
        )
        self._passes = self._rows = self._tokens = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queue = FairQueue(max(int(settings.max_running * self._owner_part), 1))
        self._admission = admission
        self._active: dict[Job, None] = {}
        self._lock = threading.Lock()
        self._unbegun = self._jobs = 0
        self._closed = False
        self.load = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; all that still wait get an error."""
        self.draining = True
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        with self._lock:
            return not self._jobs

    @property
    def full(self) -> bool:
        """Whether another job would be turned away."""
        return self._admission.total >= self._admission.most

    def in_progress(self) -> list[Job]:
        """The jobs in progress, those begun first first."""
        return list(self._active)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let these be decoded.

        Raises:
            ApiError: If there is no place for them.
        """
        if self.draining or not self.alive:
            raise stopping()
        search, texts = jobs[0].search is not None, sum(job.texts for job in jobs)
        self._admission.enter(jobs[0].owner, texts, search=search, patience=self._patience())
        with self._lock:
            # The thread takes what was put before it closes, and nothing after that.
            if not (closed := self._closed):
                self._unbegun += len(jobs)
                self._jobs += len(jobs)
                self._inbox.put(partial(self._enqueue, jobs))
        if closed:
            self._admission.leave(jobs[0].owner, texts)
            raise stopping()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End these where they are not over; nothing more is told of them. Takes effect before the next pass."""
        gone = {job for job in jobs if not job.over}
        if gone:
            self._inbox.put(partial(self._cancel, gone))

    def _patience(self) -> int:
        """Seconds after which it may be worth asking again."""
        return min(30, 1 + self._unbegun // self.settings.max_running)

    def _run(self) -> None:
        try:
            while self._heard():
                self._turn()
            ending: BaseException = stopping()
        except BaseException as error:
            self.failure = error
            ending = ApiError(500, f"the engine failed ({type(error).__name__}): the server ends", kind="server_error")
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            if (wish := self._inbox.get()) is not None:
                wish()
        for job in [*self._queue.all(), *self._active]:
            self._end(job, ending)
        if self.failure is not None:
            self.on_failure(self.failure)

    @property
    def _busy(self) -> bool:
        """Whether the engine has something to do, if only to let go of what has ended."""
        return self._engine.running + self._engine.waiting > 0

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._queue.add(job)

    def _turn(self) -> None:
        self._expire()
        self._feed()
        if self._busy:
            self._engine.step()
            self._passes += self._engine.rows > 0
            self._rows += self._engine.rows
            self._tell()
        self.load = self._measure()
        self.metrics.observe(self.load)

    def _heard(self) -> bool:
        """Do what was asked for since the last pass; with nothing to do, wait for it. False to stop."""
        waits = not (self._active or self._busy or len(self._queue))
        while True:
            try:
                wish = self._inbox.get(waits)
            except queue.Empty:
                return True
            if wish is None:
                return False
            wish()
            waits = False

    def _feed(self) -> None:
        """Hand the engine what it has a place for; who waits for memory inside it is overtaken by others alone."""
        while len(self._active) < self.settings.max_running:
            if (job := self._queue.pop(self._engine.waiting_owners)) is None:
                return
            job.begun = monotonic()
            self._active[job] = None
            self._queue.begin(job)
            self.metrics.begun(job)
            with self._lock:
                self._unbegun -= 1
            try:
                if isinstance(job.request, Fill):
                    job.filling = self.lm.begin(self._engine, job.request)
                    job.task = job.filling.work
                elif isinstance(job.request, Reading):
                    job.task = self._engine.enter(job.request.read(self._engine), owner=job.owner)
                elif job.search is not None:
                    job.request.settled = job.settle
                    if job.request.return_draft_trees:
                        job.request.followed = job.follow
                    job.task = self._engine.enter(job.search.find(self._engine, job.request), owner=job.owner)
                else:
                    like = None if job.like is None else job.like.task
                    job.task = self._engine.submit(job.request, like=like if isinstance(like, Text) else None)
            except Exception as error:
                self._end(job, error)

    def _expire(self) -> None:
        now = monotonic()
        for job in [job for job in self._active if now > job.deadline and job.task is not None]:
            assert job.task is not None
            job.late = True
            job.task.cancel()
        late = {job for job in self._queue.all() if now > job.deadline}
        for job in self._queue.remove(late):
            self._end(job, overloaded("this request has waited for all the time it may take", self._patience()))

    def _tell(self) -> None:
        """Leave news for those whose jobs grew or ended."""
        news = [each for job in list(self._active) if (each := self._news(job)) is not None]
        mailboxes = {id(each.job.mailbox.loop): each.job.mailbox.loop for each in news}
        for loop in mailboxes.values():
            deliver(loop, [each for each in news if each.job.mailbox.loop is loop])

    def _news(self, job: Job) -> Update | None:
        task = job.task
        assert task is not None
        news = Update(job)
        if isinstance(task, Text):
            grown = task.settled - job.sent
            self._tokens += grown
            if grown <= 0 and len(task.trace.steps) == job.steps and not task.finished:
                return None
            settled = max(task.settled, job.sent)
            news.tokens = task.generated[job.sent : settled]
            news.logprobs = task.token_logprobs[job.sent : settled]
            news.steps = task.trace.steps[job.steps :]
            assert task.text is not None
            news.text = task.text.release(final=task.finished)
            job.sent, job.steps = settled, len(task.trace.steps)
            self.metrics.grew(job, grown, news.steps)
        if job.filling is not None:
            known = job.filling.settled
            grown, news.steps = len(known) - job.sent, job.filling.canvas.trace.steps[job.steps :]
            if not grown and not news.steps and not task.finished:
                return None
            self._tokens += max(grown, 0)
            news.tokens, news.text, news.cells = known[job.sent :], job.filling.release(), job.cells()
            job.sent, job.steps = len(known), job.steps + len(news.steps)
            self.metrics.grew(job, grown, news.steps)
        if isinstance(job.request, Reading) and not task.finished:
            return None
        if job.search is not None:
            news.branches = job.branches()
        if job.search is not None and not task.finished:
            if len(job.known) <= job.sent and not news.branches:
                return None
            news.text, job.sent = job.known[job.sent :], len(job.known)
        if not task.finished:
            return news
        encode = partial(self.lm.tokenizer.encode, special=False)
        news.end = task.error if task.error is not None else written(job, encode)
        if job.late and not news.end:
            # No 429: clients would send the same search again.
            news.end = invalid(
                f"the search found nothing within the {self.settings.seconds:g} s of a request: ask for a smaller one",
                "decodery.search",
                "time_limit",
            )
        self._release(job, news.end)
        return news

    def _end(self, job: Job, error: BaseException) -> None:
        """A job ends by an error, in the engine or before it."""
        if job.task is not None:
            job.task.cancel()
        self._release(job, error)
        deliver(job.mailbox.loop, [Update(job, end=error)])

    def _cancel(self, gone: set[Job]) -> None:
        for job in self._queue.remove(gone):
            self._release(job, None)
        for job in [job for job in self._active if job in gone]:
            if job.task is not None:
                job.task.cancel()
            self._release(job, None)

    def _release(self, job: Job, end: list[FinishedText] | BaseException | None) -> None:
        """A job is over; its memory goes with its task."""
        job.over = True
        if isinstance(end, BaseException):
            log_failure(end, job.owner)
        self.metrics.ended(job, end)
        if job in self._active:
            del self._active[job]
            self._queue.end(job)
        self._admission.leave(job.owner, job.texts)
        with self._lock:
            self._unbegun -= job.begun is None
            self._jobs -= 1
        job.task = job.like = job.filling = None

    def _measure(self) -> ServerLoad:
        engine, prefixes = self._engine, self._prefixes
        return ServerLoad(
            running=len(self._active),
            waiting=len(self._queue),
            passes=self._passes,
            rows=engine.rows,
            rows_read=self._rows,
            tokens=self._tokens,
            cache_bytes=engine.held_bytes,
            cache_limit=self.settings.kv_bytes,
            prefix_asked=prefixes.asked,
            prefix_found=prefixes.found,
            prefix_bytes=prefixes.bytes,
            preemptions=engine.preemptions,
        )
