"""The kit's frame: a clock, one check after another, and a results file that is complete after each of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

PASSED, FAILED, MEASURED, REFUSED, STOPPED, NOT_RUN = "passed", "failed", "measured", "refused", "stopped", "not run"
SCHEMA, KIND = 1, "gpu"
GRACE = 10.0
"""Seconds that a check which no signal interrupts may go on after the kit's end; then the process ends."""


class NotRunError(Exception):
    """A check that cannot run here, and why."""


class OutOfTime(BaseException):
    """The time of a check is over. No check may take it for an error of its own."""


@dataclass
class Row:
    """What came of one check. outcome: one of those above; says: one line; values: figures, by name."""

    part: str
    check: str
    outcome: str
    says: str
    seconds: float
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Kit:
    """One run. settings: what it was asked for; facts: of the machine, once they are known; at_end: prints a table."""

    out: Path
    minutes: float
    settings: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    at_end: Callable[[Kit], None] = lambda kit: None

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._begun = monotonic()
        self._until = self._begun + 60 * self.minutes
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        (self.out / "gpu.log").write_text("", encoding="utf-8")
        self._watch = threading.Timer(60 * self.minutes + GRACE, self._give_up)
        self._watch.daemon = True
        self._watch.start()

    @property
    def left(self) -> float:
        """Seconds until the kit's end."""
        return self._until - monotonic()

    def reserve(self, seconds: float) -> float:
        """Seconds that are left once so many are kept for what comes later."""
        return max(0.0, self.left - seconds)

    def note(self, text: str) -> None:
        """A line for the log and for who is watching."""
        line = f"[{monotonic() - self._begun:6.1f} s] {text}"
        print(line, flush=True)
        with (self.out / "gpu.log").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def check(
        self,
        part: str,
        name: str,
        body: Callable[[], tuple[str, dict[str, Any]]],
        *,
        needs: float,
        most: float = 120.0,
        keeps: float = 0.0,
        outcome: str = PASSED,
    ) -> Row:
        """Run one check and write down what came of it.

        Args:
            part: The part it belongs to.
            name: Its name.
            body: Does it, and returns one line and figures. What it raises fails the check; `NotRunError` says why it
                did not run, and a refusal of the package is recorded as such.
            needs: Seconds without which it does not begin.
            most: Seconds after which it is stopped.
            keeps: Seconds that are kept for later parts.
            outcome: What it is where nothing is raised.

        Returns:
            The row, which is in the results file already.
        """
        from decodery.core.errors import SettingsError, UnsupportedModel

        begun, room, values = monotonic(), self.reserve(keeps), dict[str, Any]()
        try:
            if room < needs:
                raise NotRunError(f"{room:.0f} s were left for it, and it needs {needs:.0f}")
            with alarm(min(most, room)):
                says, values = body()
        except NotRunError as error:
            outcome, says = NOT_RUN, str(error)
        except OutOfTime:
            outcome, says = STOPPED, f"it had not ended after {monotonic() - begun:.0f} s"
        except (UnsupportedModel, SettingsError) as error:
            outcome, says = REFUSED, str(error)
        except Exception as error:
            outcome, says = FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.note(traceback.format_exc())
        row = Row(part, name, outcome, says, round(monotonic() - begun, 2), values)
        self.rows.append(row)
        self.note(f"{part} | {name} | {outcome} | {says}")
        self.write()
        return row

    def write(self) -> None:
        """The results file as it is now, whole or not at all."""
        path = self.out / "gpu.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(dumped(self.result()), encoding="utf-8")
        temporary.replace(path)

    def result(self) -> dict[str, Any]:
        """The results file's object."""
        return {
            "schema": SCHEMA,
            "kind": KIND,
            "complete": self.complete,
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "created": self.created,
            "seconds": round(monotonic() - self._begun, 1),
            "machine": None,
            **self.facts,
            "settings": self.settings,
            "rows": [asdict(row) for row in self.rows],
        }

    def finish(self) -> None:
        """Write everything a last time and stop watching the clock."""
        self.complete = True
        self._watch.cancel()
        self.write()
        self.at_end(self)

    def _give_up(self) -> None:
        """End a process whose check does not return, as one that waits for a device does not."""
        self.note(f"the last check did not return {GRACE:.0f} s after the end: the process ends here")
        self.write()
        self.at_end(self)
        os._exit(3)


def commit() -> str | None:
    """The commit of the working tree that holds this file, None where git or the tree is missing."""
    try:
        folder = Path(__file__).parent
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in this thread after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def dumped(result: dict[str, Any]) -> str:
    """JSON with one line for each row."""
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items() if name != "rows"]
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    return "{\n " + ",\n ".join([*head, f'"rows": [\n  {rows}\n ]']) + "\n}\n"
