"""The kit's frame: a clock, one check after another, and a results file that is complete after each of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
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
RESULTS, DOING = "gpu.json", ".doing.json"
"""Names in `out`: what was found, and which check is in progress."""
ASKED = 5.0
"""Seconds in which a device is to say whether it still computes."""


class Broken(BaseException):
    """The device answers no more: another process is to go on."""


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
    """One run.

    settings: what it was asked for; begun: when, by `monotonic`; facts: of the machine, once they are known; alive:
    whether the device still computes. Checks whose rows are in `out` already are not run again.
    """

    out: Path
    minutes: float
    settings: dict[str, Any]
    begun: float = field(default_factory=monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    alive: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._until = self.begun + 60 * self.minutes
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        if (self.out / RESULTS).is_file():
            earlier = json.loads((self.out / RESULTS).read_text(encoding="utf-8"))
            self.created, self.rows = earlier["created"], [Row(**row) for row in earlier["rows"]]

    def done(self, part: str, name: str) -> Row | None:
        """The row of a check that was run, None where it was not."""
        return next((row for row in self.rows if (row.part, row.check) == (part, name)), None)

    @property
    def left(self) -> float:
        """Seconds until the kit's end."""
        return self._until - monotonic()

    def reserve(self, seconds: float) -> float:
        """Seconds that are left once so many are kept for what comes later."""
        return max(0.0, self.left - seconds)

    def note(self, text: str) -> None:
        """A line for the log and for who is watching."""
        line = f"[{monotonic() - self.begun:6.1f} s] {text}"
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

        Raises:
            Broken: If the device answers no more.
        """
        from decodery.core.errors import SettingsError, UnsupportedModel

        if (known := self.done(part, name)) is not None:
            return known
        begun, room, values = monotonic(), self.reserve(keeps), dict[str, Any]()
        doing = {"part": part, "check": name, "begun": begun, "end": begun + min(most, room)}
        (self.out / DOING).write_text(json.dumps(doing), encoding="utf-8")
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
        if outcome in (FAILED, STOPPED):
            # A device that hangs does not say so.
            doing |= {"end": monotonic() + ASKED, "written": True}
            (self.out / DOING).write_text(json.dumps(doing), encoding="utf-8")
            if not self.alive():
                self.note("the device answers no more: another process goes on")
                raise Broken
        (self.out / DOING).unlink()
        return row

    def write(self) -> None:
        """The results file as it is now, whole or not at all."""
        path = self.out / RESULTS
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
            "seconds": round(monotonic() - self.begun, 1),
            "machine": None,
            **self.facts,
            "settings": self.settings,
            "rows": [asdict(row) for row in self.rows],
        }

    def finish(self) -> None:
        """Write everything a last time."""
        self.complete = True
        self.write()


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
