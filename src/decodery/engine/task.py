"""What makes progress by asking: a text, a search, anything else that needs passes of the engine's model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

from decodery.core.ledger import Ledger, charging
from decodery.core.trace import Trace
from decodery.models.cache.cache import KVCache
from decodery.models.protocol import Reader
from decodery.step.forward_request import Blocking, ForwardCoroutine, ForwardRequest, ForwardResult, Returned
from decodery.step.sequence import Sequence

T = TypeVar("T")


class Recoverable(Protocol):
    """What a task remembers of its model apart from any text, and can have computed again.

    Attributes:
        bytes: Bytes that it holds beside caches.
        awaited: Bytes, at most, that its next pass takes, of results and of keys and values.
    """

    @property
    def bytes(self) -> int: ...

    @property
    def awaited(self) -> int: ...

    def give_back(self) -> bool:
        """Let go of it; False where it must stay for what is being asked."""
        ...

    def recover(self) -> ForwardCoroutine[None]:
        """Have all of it again, as it was."""
        ...


@dataclass(eq=False)
class CoroutineTask(Generic[T]):
    """Something other than a text in progress: a search, a probe.

    Attributes:
        memory: What it can give back and have again, beside its branches.
        paused: Takes part in no pass until that is taken back.
        finished: It goes on no more, because it came to its end, failed or was stopped.
        stopped: It was, before its end, so that there is no result.
        result: What it returned, once it is finished.
    """

    coroutine: ForwardCoroutine[T]
    memory: Recoverable | None = None
    paused: bool = False
    finished: bool = False
    stopped: bool = False
    result: T | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End it for a reason the caller must hear of."""
        self.error, self.finished = error, True

    def cancel(self) -> None:
        """Stop it where it has not come to its end; nothing is returned."""
        if not self.finished:
            self.coroutine.close()
            self.finished = self.stopped = True

    def run(self) -> ForwardCoroutine[None]:
        """All of it: unlike a text's, its turn goes on over any number of passes."""
        self.result = yield from self.coroutine
        self.finished = True


Task = Sequence | CoroutineTask
Answer = ForwardResult | Returned | Exception
_Asked = tuple[Generator[list[ForwardRequest], list[ForwardResult], None], list[ForwardRequest], list[Answer | None]]


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """What was taken from a cache.

    Attributes:
        model: Whose it is.
        tokens: What it held.
        role: What that goes by in the ledger.
    """

    model: Reader
    cache: KVCache
    tokens: list[int]
    role: str = ""


@dataclass(eq=False)
class SchedulerEntry:
    """A task's turn in progress.

    Attributes:
        requests: What it waits for.
        results: Of those that have one, None of the others.
        traces: Of the texts it works on, where steps are recorded.
        ledger: What the request spends, which the texts of a search share.
        caches: Those it asked with and still has.
        branches: Of a search, all it has.
        lost: What its branches have to read again before it goes on.
        forgotten: Whether its own memory is gone.
        owed: The bytes that takes.
        waiting: What it waits for while that is done, as coroutine, requests and results.
        restored: That is done, and it has not gone on since.
        starved: Not to go on before another task has given memory back.
        stalled: Found no memory for its last turn, and holds what it cannot give back.
        served: The number of the last pass it took part in; its fraction grows with the task's turn in it.
        depth: Of how many passes one after another.
        owner: Whose it is: owners share passes alike.
        prompt_rows: Rows of logits that a text takes at most while its prompt is read, 0 once it is.
        earlier: Seconds of passes that answered a part of what its next step waits for.
    """

    task: Task
    coroutine: Generator[list[ForwardRequest], list[ForwardResult], None] | None = None
    requests: list[ForwardRequest] = field(default_factory=list)
    results: list[Answer | None] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    caches: WeakSet[KVCache] = field(default_factory=WeakSet)
    branches: WeakValueDictionary[int, Sequence] = field(default_factory=WeakValueDictionary)
    lost: list[Lost] = field(default_factory=list)
    forgotten: bool = False
    owed: int = 0
    waiting: _Asked | None = None
    restored: bool = False
    starved: bool = False
    stalled: bool = False
    served: float = 0.0
    depth: int = 0
    owner: str = ""
    prompt_rows: int = 0
    earlier: float = 0.0
    _known: tuple[list[Answer | None], int, list[int], int] | None = None

    @property
    def waits(self) -> bool:
        """Whether a request of it has no result yet."""
        return None in self.results

    @property
    def unanswered(self) -> list[int]:
        """The numbers of the requests that wait for a pass."""
        return self._waiting_for()[0]

    @property
    def unanswered_rows(self) -> int:
        """Rows of these requests."""
        return self._waiting_for()[1]

    def _waiting_for(self) -> tuple[list[int], int]:
        """Numbers and rows of the requests that wait for a pass; a wide search is looked through once a step."""
        left = self.results.count(None)
        if self._known is None or self._known[0] is not self.results or self._known[1] != left:
            found = [
                n for n, each in enumerate(self.results) if each is None and not isinstance(self.requests[n], Blocking)
            ]
            self._known = self.results, left, found, sum(len(self.requests[n].segment) for n in found)
        return list(self._known[2]), self._known[3]

    @property
    def blocked(self) -> bool:
        """Whether it waits for a function that runs beside the loop."""
        return self.waits and len(self.unanswered) < self.results.count(None)

    def interrupt(self, first: Generator[list[ForwardRequest], list[ForwardResult], None]) -> None:
        """Let `first` come to its end before what is waited for."""
        assert self.coroutine is not None
        self.waiting = self.coroutine, self.requests, self.results
        self.coroutine, self.requests, self.results = first, [], []

    def abandon(self) -> None:
        """Let go of what was begun to read the branches again."""
        if self.waiting is None:
            return
        assert self.coroutine is not None
        self.coroutine.close()
        (self.coroutine, self.requests, self.results), self.waiting = self.waiting, None
        for each in self.lost:
            each.cache.become(each.model.new_cache())
        if self.forgotten and isinstance(self.task, CoroutineTask) and self.task.memory is not None:
            self.task.memory.give_back()

    def resume(self) -> None:
        """Go on with the results to the next requests, or to the end of the turn.

        An error ends this task alone.
        """
        assert self.coroutine is not None
        answers, passes = self.results, sum(not isinstance(each, Blocking) for each in self.requests)
        self.requests, self.results = [], []
        if answers:
            if self.waiting is None:
                self.restored = False
            self.depth += passes > 0
            self.ledger.depth = max(self.ledger.depth, self.depth)
        try:
            error = next((each for each in answers if isinstance(each, Exception)), None)
            with charging(self.ledger):
                if error is not None:
                    self.requests = self.coroutine.throw(error)
                else:
                    self.requests = self.coroutine.send(answers) if answers else next(self.coroutine)  # type: ignore[arg-type]
            self.results = [None] * len(self.requests)
        except StopIteration:
            self.coroutine = None
            if self.waiting is not None:
                (self.coroutine, self.requests, self.results), self.waiting = self.waiting, None
                self.lost, self.forgotten, self.owed, self.restored = [], False, 0, True
        except Exception as failure:
            self.coroutine = None
            self.stop()
            self.task.fail(failure)

    def stop(self) -> None:
        """Leave the turn; what it had asked for is not wanted any more."""
        for coroutine in (self.coroutine, self.waiting and self.waiting[0]):
            if coroutine is not None:
                # It is left whatever it makes of that.
                with suppress(Exception):
                    coroutine.close()
        self.coroutine, self.requests, self.results, self.waiting = None, [], [], None
