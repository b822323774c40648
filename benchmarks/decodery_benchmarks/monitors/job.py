"""A benchmark of monitors from its settings to its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from decodery.bench.result import Result, heading
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress
from decodery_benchmarks.kinds import MONITORS
from decodery_benchmarks.report import save

from .settings import WatchSettings


@dataclass
class WatchJob:
    """One benchmark of a loaded model. out: folder for results.json, report.html and what testbeds keep, None to write
    nothing. earlier: an interrupted result, whose testbeds are not measured again.
    """

    lm: LLM
    settings: WatchSettings
    out: Path | None = None
    earlier: Result | None = None
    _done: dict[str, dict[str, list[Any]]] = field(default_factory=dict, init=False)
    _seconds: float = field(default=0.0, init=False)

    def run(self, report: Progress, stopped: Callable[[], bool] = lambda: False) -> Result:
        """Measure, write the files, return the result.

        stopped: asked before every testbed whether to end; what is done is kept, and `complete` is then false.
        """
        begin = monotonic()
        if self.earlier is not None:
            self._done = dict(self.earlier["done"])
        with TemporaryDirectory() as temporary:
            work = Path(temporary) if self.out is None else self.out
            for name in self.settings.methods:
                if name in self._done:
                    continue
                if stopped():
                    return self._save(complete=False)
                measure = import_module(f"{__package__}.{name}").measure
                rows, acts, notes = measure(self.lm, self.settings, work, report)
                self._done[name] = {"rows": rows, "acts": acts, "notes": notes}
                self._seconds = monotonic() - begin
                self._save(complete=False)
        return self._save(complete=True)

    def _save(self, *, complete: bool) -> Result:
        whole = {
            part: [each for name in self.settings.methods if name in self._done for each in self._done[name][part]]
            for part in ("rows", "acts", "notes")
        }
        result = heading(
            MONITORS,
            self.lm,
            self.settings.to_dict(),
            complete=complete,
            seconds=self._seconds,
            before=self.earlier,
        )
        result |= whole | {"done": self._done}
        save(result, self.out)
        return result
