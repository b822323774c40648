"""`decodery bench --workload long-context`: what cache policies lose, hold and read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_workload import settled, shown

if TYPE_CHECKING:
    from decodery.bench.result import Result


def measure(given: dict[str, Any], out: Path | None, *, as_json: bool, resume: bool) -> Result:
    """Measure cache policies by budget, and show what came of it. given: other options."""
    from decodery.bench.contexts.job import ContextJob
    from decodery.bench.contexts.settings import ContextSettings
    from decodery.bench.result import CONTEXTS

    settings, earlier = settled("long-context", CONTEXTS, ContextSettings, given, out, resume)
    return shown(settings, lambda lm, *watched: ContextJob(lm, settings, out, earlier).run(*watched), as_json=as_json)
