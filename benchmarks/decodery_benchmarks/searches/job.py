"""A benchmark of searches from its settings to its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from decodery.bench.result import Result, heading, write
from decodery.core.errors import CorruptFile
from decodery.llm.llm import LLM
from decodery_benchmarks.kinds import SEARCH
from decodery_benchmarks.puzzles import drawn
from decodery_benchmarks.report import save

from .figures import cells, rows
from .pools import run, sampled
from .settings import POOLED, SearchSettings

TRACES = "traces.jsonl"

Report = Callable[[str, int, int], None]
Unit = tuple[int, str, str, int]
"""Number of a puzzle, method ("" for its pool), reward and budget."""


@dataclass
class SearchJob:
    """One benchmark of a loaded model. out: folder for results.json, report.html and the traces, None to write nothing.

    resumed: whether to go on with the traces that are in `out` already.
    """

    lm: LLM
    settings: SearchSettings
    out: Path | None = None
    resumed: bool = False
    _traces: list[dict[str, Any]] = field(default_factory=list, init=False)
    _seconds: float = field(default=0.0, init=False)

    def run(self, report: Report, stopped: Callable[[], bool] = lambda: False) -> Result:
        """Measure, write the files, return the result.

        stopped: asked before every search whether to end; what is done is kept, and `complete` is then false.
        """
        self.settings.check()
        if self.out is not None and self.resumed:
            self._traces = read_traces(self.out / TRACES)
        elif self.out is not None:
            write(self.out / TRACES, "")
        # Where it is written from the beginning, an interruption leaves something to go on with.
        self._save(complete=False)
        asked = self.settings
        prompts = list(islice(drawn(asked.asked, asked.split, asked.seed), asked.prompts))
        units = list(self._units(len(prompts)))
        done = {_unit_of(trace) for trace in self._traces}
        begin, complete = monotonic(), True
        for place, unit in enumerate(units):
            if unit in done:
                continue
            if stopped():
                complete = False
                break
            number, method, reward, budget = unit
            report(method or "sampling", place, len(units))
            if method:
                trace = run(self.lm, self.settings, (method, reward, budget), prompts[number], number)
            else:
                trace = sampled(self.lm, self.settings, prompts[number], number)
            self._keep(trace)
        self._seconds = monotonic() - begin
        return self._save(complete=complete)

    def _units(self, puzzles: int) -> Iterator[Unit]:
        """Puzzle by puzzle, so that an interrupted benchmark has whole ones."""
        for number in range(puzzles):
            yield number, "", "", 0
            for method, reward, budget in cells(self.settings):
                if method not in POOLED:
                    yield number, method, reward, budget

    def _keep(self, trace: dict[str, Any]) -> None:
        self._traces.append(trace)
        if self.out is not None:
            with (self.out / TRACES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(trace) + "\n")

    def _save(self, *, complete: bool) -> Result:
        result = heading(SEARCH, self.lm, self.settings.to_dict(), complete=complete, seconds=self._seconds)
        result |= {"notes": [], "rows": rows(self.settings, self._traces)}
        save(result, self.out)
        return result


def read_traces(path: Path) -> list[dict[str, Any]]:
    """What was written until an interruption, of which the last line may be a part."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFile(f"cannot read {path}: {error}; start again without --resume") from error
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            trace = json.loads(line)
            _unit_of(trace)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptFile(f"line {number} of {path} is no trace: start again without --resume") from error
        found.append(trace)
    if lines[-1]:
        write(path, "".join(line + "\n" for line in lines[:-1]))
    return found


def _unit_of(trace: dict[str, Any]) -> Unit:
    if trace["kind"] == "pool":
        return int(trace["puzzle"]), "", "", 0
    return int(trace["puzzle"]), str(trace["method"]), str(trace["reward"]), int(trace["n"])
