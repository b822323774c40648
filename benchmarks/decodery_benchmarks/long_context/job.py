"""A benchmark of cache policies from its settings to its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from decodery.bench.result import Result, heading, write
from decodery.core.errors import SettingsError, UnsupportedModel
from decodery.core.registry import resolve
from decodery.llm.llm import LLM
from decodery.models.loaders.store import Progress
from decodery_benchmarks.kinds import CONTEXTS
from decodery_benchmarks.report import save

from .bounds import Oracle, Uniform
from .errors import Errors
from .figures import Row, plot
from .measure import Bench, measure
from .recall import Recall
from .settings import BOUNDS, ORACLE, ContextSettings, spec_of


@dataclass
class ContextJob:
    """One benchmark of a loaded model. out: folder for results.json, report.html and budgets.svg, None to write
    nothing. earlier: an interrupted result, whose rows are not measured again.
    """

    lm: LLM
    settings: ContextSettings
    out: Path | None = None
    earlier: Result | None = None
    _rows: list[Row] = field(default_factory=list, init=False)
    _full: dict[str, list[int]] = field(default_factory=dict, init=False)
    _seconds: float = field(default=0.0, init=False)

    def run(self, report: Progress, stopped: Callable[[], bool] = lambda: False) -> Result:
        """Measure, write the files, return the result.

        stopped: asked before every row whether to end; what is done is kept, and `complete` is then false.
        """
        begin = monotonic()
        if self.earlier is not None:
            self._rows, self._full = list(self.earlier["rows"]), dict(self.earlier["full"])
        done = {(row["policy"], row["budget"]) for row in self._rows}
        units = self.settings.units
        bench = Bench(self.lm, self.settings)
        errors, recall = Errors(bench), Recall(self.settings.seed, report)
        for number, (method, share) in enumerate(units):
            if (method, share) in done:
                continue
            if stopped():
                return self._save(complete=False)
            report("cache policies", number, len(units))
            if not self._full:
                self._full = bench.solved_of_all()
            self._rows.append({"policy": method, "budget": share, **_figures(bench, method, share, errors, recall)})
            self._seconds = monotonic() - begin
            self._save(complete=False)
        return self._save(complete=True)

    def _save(self, *, complete: bool) -> Result:
        order = {unit: at for at, unit in enumerate(self.settings.units)}
        result = heading(
            CONTEXTS,
            self.lm,
            self.settings.to_dict(),
            complete=complete,
            seconds=self._seconds,
            before=self.earlier,
        ) | {"full": self._full, "rows": sorted(self._rows, key=lambda row: order[row["policy"], row["budget"]])}
        save(result, self.out)
        if self.out is not None:
            write(self.out / "budgets.svg", plot(result["rows"]))
        return result


def _figures(bench: Bench, method: str, share: float, errors: Errors, recall: Recall) -> dict[str, Any]:
    if method in BOUNDS:
        kv: Any = Oracle(share) if method == ORACLE else Uniform(share)
        spec = None
    else:
        spec = spec_of(method, share)
        kv = resolve("cache-policy", spec)
    drafts = None if spec is None or kv.probes else f"{spec.replace(':', '(', 1)})"
    found = measure(bench, kv, drafts=drafts, errors=None if kv.probes else errors)
    try:
        return found | recall.of(kv)
    except (SettingsError, UnsupportedModel):
        # What was made for the large model fits no other.
        return found
