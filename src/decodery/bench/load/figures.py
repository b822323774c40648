"""From what clients saw to the figures of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .client import Seen
from .settings import LoadSettings

PERCENTILES = (50, 90, 99)
Row = dict[str, Any]


def row(
    server: str, mode: str, load: float, seen: Sequence[Seen], busy: float, settings: LoadSettings, *, again: int = 0
) -> Row:
    """A stage. mode, load: "concurrency" and how many, or "rate" and how many per second, or "speed" of a trace.

    busy: seconds until the last arrival, so that the end of a stage, when few are served, does not count in
    rates. again: requests whose prompt the server was sent before. requests, errors; good: answers within the limits,
    good_share of all; requests_per_second, goodput (good ones per second), tokens_per_second; first_token, gap (between
    pieces of text), per_token, whole: percentiles in seconds.
    """
    served = [each for each in seen if not each.error]
    good = [each for each in served if each.good(settings)]
    seconds = max(busy, 1e-9)
    return {
        "server": server,
        "mode": mode,
        "load": load,
        "requests": len(seen),
        "seen_before": again,
        "errors": len(seen) - len(served),
        "good": len(good),
        "good_share": round(len(good) / len(seen), 4),
        "seconds": round(max(each.end for each in seen), 3),
        "busy_seconds": round(busy, 3),
        "requests_per_second": round(sum(_share(each, busy) for each in served) / seconds, 4),
        "goodput": round(sum(_share(each, busy) for each in good) / seconds, 4),
        "tokens_per_second": round(sum(each.tokens * _share(each, busy) for each in served) / seconds, 2),
        "tokens": sum(each.tokens for each in served),
        "prompt_tokens": sum(each.prompt_tokens for each in served),
        "first_token": _percentiles(each.first for each in served),
        "gap": _percentiles(gap for each in served for gap in each.gaps),
        "per_token": _percentiles(each.per_token for each in served),
        "whole": _percentiles(each.end - each.at for each in served),
    }


def _share(seen: Seen, until: float) -> float:
    """How much of an answer was there by then."""
    if seen.end <= until or not seen.times:
        return float(seen.end <= until)
    return sum(time <= until for time in seen.times) / len(seen.times)


def _percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {f"p{each}": round(float(np.percentile(found, each)), 5) for each in PERCENTILES}
