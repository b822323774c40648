"""A measurement of load from its settings to its files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from decodery.core.errors import DecoderyError

from ..report import save
from ..result import LOAD, Result, stamp
from .arrivals import arrivals, seen_before
from .figures import row
from .settings import LoadSettings
from .stage import StoppedError, stage
from .target import Target

_FIRST_RATE, _FASTER, _MOST_STAGES = 0.5, 2**0.5, 24
_BROKEN = 0.5
"""A service of which fewer answers are good is broken: a higher rate tells nothing more."""
_WARM = 3

Report = Callable[[str, int, int], None]
Stage = tuple[str, float]


@dataclass
class LoadJob:
    """One measurement of one or more servers, each for itself. out: folder for results.json and report.html.

    model: what the servers run, with its `name`. earlier: the result of an interrupted run with the same settings, to
    go on from.
    """

    settings: LoadSettings
    targets: Sequence[Target]
    model: dict[str, str]
    out: Path | None = None
    earlier: Result | None = None
    _rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    _requests: list[dict[str, Any]] = field(default_factory=list, init=False)
    _notes: list[str] = field(default_factory=list, init=False)
    _seconds: float = field(default=0.0, init=False)

    def run(self, report: Report, stopped: Callable[[], bool] = lambda: False) -> Result:
        """Measure, write the files, return the result. Raises DecoderyError where the only server is none.

        stopped: asked all the time whether to end; stages that are done are kept, and `complete` is then false.
        """
        if self.earlier is not None:
            self._rows, self._requests = list(self.earlier["rows"]), list(self.earlier["requests"])
            self._seconds = float(self.earlier["seconds"])
        # What is wrong with a trace or a workload is said before a server is started.
        arrivals(self.settings, None, 0)
        complete = True
        for target in self.targets:
            if next(self._left(target.name), None) is None:
                continue
            try:
                with target.open(stopped) as url:
                    self._measure(target.name, url, report, stopped)
            except StoppedError:
                complete = False
                break
            except DecoderyError as error:
                if stopped():
                    complete = False
                    break
                if len(self.targets) == 1:
                    raise
                self._notes.append(f"{target.name} was left out: {error}")
        return self._save(complete=complete)

    def _measure(self, name: str, url: str, report: Report, stopped: Callable[[], bool]) -> None:
        report(f"{name}: warming up", 0, _WARM)
        warm = arrivals(self.settings, None, 0)[:_WARM]
        asyncio.run(stage(url, warm, self.settings, clients=1, stopped=stopped))
        for mode, load in self._left(name):
            number = 1 + sum(each["server"] == name for each in self._rows)
            asked = arrivals(self.settings, None if mode == "concurrency" else load, number)
            clients = int(load) if mode == "concurrency" else None
            told = partial(self._told, report, f"{name}: {mode} {load:g}", len(asked))
            begin = monotonic()
            seen, busy = asyncio.run(stage(url, asked, self.settings, clients=clients, report=told, stopped=stopped))
            self._seconds += monotonic() - begin
            again = seen_before(self.settings, number, _WARM)
            self._rows.append(row(name, mode, load, seen, busy, self.settings, again=again))
            if again:
                self._notes.append(
                    f"{name}, {mode} {load:g}: {again} of {len(asked)} prompts were sent before; what the server "
                    "remembers of their answers counts"
                )
            stamp = {"server": name, "mode": mode, "load": load}
            self._requests += [stamp | each.to_dict() for each in seen]
            if self.out is not None:
                self._save(complete=False)

    @staticmethod
    def _told(report: Report, what: str, total: int, done: int) -> None:
        report(what, done, total)

    def _left(self, name: str) -> Iterator[Stage]:
        """The stages of a server that are to come; what has been measured until then decides on the next one."""

        def found(stage: Stage) -> dict[str, Any] | None:
            same = [each for each in self._rows if (each["server"], each["mode"], each["load"]) == (name, *stage)]
            return same[0] if same else None

        for clients in self.settings.concurrency:
            if found(one := ("concurrency", float(clients))) is None:
                yield one
        mode = "rate" if self.settings.trace is None else "speed"
        first = _FIRST_RATE if self.settings.trace is None else 1.0
        rates = self.settings.rates or tuple(round(first * _FASTER**power, 3) for power in range(_MOST_STAGES))
        for rate in rates:
            if found(one := (mode, rate)) is None:
                yield one
            if not self.settings.rates and (done := found(one)) is not None and done["good_share"] < _BROKEN:
                return

    def _save(self, *, complete: bool) -> Result:
        result: Result = {
            **stamp(LOAD),
            "complete": complete,
            "seconds": round(self._seconds, 1),
            "model": self.model,
            "settings": self.settings.to_dict(),
            "servers": [target.name for target in self.targets],
            "notes": self._notes,
            "rows": self._rows,
            "requests": self._requests,
        }
        save(result, self.out)
        return result
