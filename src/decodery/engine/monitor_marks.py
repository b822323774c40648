"""What one monitor of a text knows, and what it is taken back to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from decodery.models.hooks import Tap
from decodery.step.detokenizer import TextStream
from decodery.step.monitor import Monitor, MonitorReport


@dataclass
class MonitorState:
    """One monitor of a text.

    Attributes:
        monitor: The monitor.
        taps: What it reads of rows.
        state: What it remembers.
        report: What it found.
        spans: From which positions on its rows are changed, and how.
    """

    monitor: Monitor
    taps: tuple[Tap, ...]
    state: Any
    report: MonitorReport
    spans: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def off(self) -> bool:
        """Whether an error has turned it off."""
        return self.report.error is not None

    def fork(self) -> MonitorState:
        """The same for a text that goes on apart."""
        return replace(self, spans=list(self.spans), report=replace(self.report, scores=list(self.report.scores)))

    def mark(self) -> Mark:
        """What is needed to return to this token."""
        report = self.report
        return Mark(self.state, len(self.spans), len(report.scores), report.flagged, report.error, report.unlike)

    def back_to(self, mark: Mark) -> None:
        """Forget what was found since."""
        report = self.report
        self.state = mark.state
        del self.spans[mark.spans :], report.scores[mark.scores :]
        report.flagged, report.error, report.unlike = mark.flagged, mark.error, mark.unlike


@dataclass(frozen=True, slots=True)
class Mark:
    """What a monitor knew at some token: its state, and how long its lists were, which only grow."""

    state: Any
    spans: int
    scores: int
    flagged: int | None
    error: str | None
    unlike: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """All that is to be had again when the token at an output position is taken back."""

    position: int
    marks: list[Mark]
    text: TextStream | None
    processor_states: Any
