"""What makes progress by asking: a text, a search, anything else that needs passes of the engine's model."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..core.ask import Ask, Asking, Scored
from ..core.sequence import Sequence
from ..core.trace import Trace

T = TypeVar("T")


@dataclass(eq=False)
class Work(Generic[T]):
    """Something other than a text in progress: a search, a probe. result: what it returned, once it is finished.

    paused: takes part in no pass until that is taken back.
    """

    asking: Asking[T]
    paused: bool = False
    finished: bool = False
    result: T | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End it for a reason the caller must hear of."""
        self.error, self.finished = error, True

    def cancel(self) -> None:
        """End it; nothing is returned."""
        self.asking.close()
        self.finished = True

    def turn(self) -> Asking[None]:
        """All of it: unlike a text's, its turn goes on over any number of passes."""
        self.result = yield from self.asking
        self.finished = True


Task = Sequence | Work


@dataclass(eq=False)
class Turn:
    """A task's turn in progress. asks: what it waits for; answers: what of it has been answered.

    traces: of the texts it works on, where steps are recorded. spent: what others than the target read for it since the
    last of these. served: the number of the last pass it took part in.
    """

    task: Task
    asking: Generator[list[Ask], list[Scored], None] | None = None
    asks: list[Ask] = field(default_factory=list)
    answers: list[Scored | Exception | None] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    served: int = 0

    @property
    def waits(self) -> bool:
        """Whether an ask of it is not answered."""
        return any(each is None for each in self.answers)

    def resume(self) -> None:
        """Go on with the answers to the next asks, or to the end of the turn; an error ends the task, never others."""
        assert self.asking is not None
        answers, self.asks, self.answers = self.answers, [], []
        try:
            error = next((each for each in answers if isinstance(each, Exception)), None)
            if error is not None:
                self.asks = self.asking.throw(error)
            else:
                self.asks = self.asking.send(answers) if answers else next(self.asking)  # type: ignore[arg-type]
            self.answers = [None] * len(self.asks)
        except StopIteration:
            self.asking = None
        except Exception as failure:
            self.asking = None
            self.task.fail(failure)

    def stop(self) -> None:
        """Leave the turn; what it had asked for is not wanted any more."""
        if self.asking is not None:
            self.asking.close()
        self.asking, self.asks, self.answers = None, [], []
