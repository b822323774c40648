"""`decodery bench --workload monitors`: what monitors tell, and what acting on them does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_workload import settled, shown

if TYPE_CHECKING:
    from decodery.bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure monitors on their testbeds, and show what came of it. given: other options."""
    from decodery.bench.result import MONITORS
    from decodery.bench.watching.job import WatchJob
    from decodery.bench.watching.settings import WatchSettings

    settings, earlier = settled("monitors", MONITORS, WatchSettings, given, out, resume)
    return shown(settings, lambda lm, *watched: WatchJob(lm, settings, out, earlier).run(*watched), as_json=as_json)
