"""What a forward pass costs by its number of rows and its precision, against the machine's memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from decodery.core.native.kernels import read_bandwidth
from decodery.models.footprint import weight_bytes
from decodery.models.protocol import LanguageModel
from decodery.step.pass_cost import CONTEXT, FAR_CONTEXT, CostCurve, remember, time_far, time_passes

from .result import PASSES, Result, stamp

ROWS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 15


def measure(
    models: dict[str, LanguageModel],
    name: str,
    rows: Sequence[int] = ROWS,
    *,
    repeats: int = REPEATS,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Time passes of the models, by precision; if `rows` covers `ROWS`, keep the cost curves for budget policies.

    machine, model; read_gb_per_s: the fastest streaming read, the better of one before and one after; rows: per
    precision and number of rows `ms` (median of `repeats` interleaved passes after 128 cached tokens),
    `gb_per_s` of weights read, `bandwidth_share` of read_gb_per_s (1 for passes that are bound by reading alone),
    `ratio_to_one` row, and the quartiles `ms_low` and `ms_high`; far: medians of a few passes after a longer text.
    """

    def enough(done: int) -> bool:
        report(done, repeats)
        return done >= repeats

    device = next(iter(models.values())).device
    bandwidth = _bandwidth(device)
    timings = time_passes(models, [1, *rows], enough=enough)
    far = time_far(models, repeats)
    bandwidth = max(bandwidth, _bandwidth(device))
    found: list[dict[str, Any]] = []
    for precision, model in models.items():
        if set(rows) >= set(ROWS):
            remember(model, CostCurve.of(timings[precision], far[precision]))
        found += rows_of(precision, timings[precision], weight_bytes(model), bandwidth)
    return {
        **stamp(PASSES),
        "settings": {"rows": list(rows)},
        "model": {"name": name, "device": str(device), "weight_bytes": _sizes(models)},
        "context": CONTEXT,
        "repeats": repeats,
        "far": {
            "context": FAR_CONTEXT,
            "ms": {
                precision: {str(count): round(float(np.median(times)) * 1e3, 3) for count, times in by_rows.items()}
                for precision, by_rows in far.items()
            },
        },
        "read_gb_per_s": round(bandwidth, 2),
        "rows": found,
    }


def rows_of(
    precision: str, timings: Mapping[int, Sequence[float]], size: int, bandwidth: float
) -> list[dict[str, Any]]:
    """A row per number of rows that was timed, 1 among them; see `measure`. size: bytes of weights a pass reads."""
    found = []
    one = float(np.median(timings[1]))
    for count, times in sorted(timings.items()):
        low, middle, high = (float(value) for value in np.percentile(times, [25, 50, 75]))
        speed = size / middle / 1e9
        found.append(
            {
                "precision": precision,
                "rows": count,
                "ms": round(middle * 1e3, 4),
                "gb_per_s": round(speed, 2),
                "bandwidth_share": round(speed / bandwidth, 4),
                "ratio_to_one": round(middle / one, 3),
                "ms_low": round(low * 1e3, 4),
                "ms_high": round(high * 1e3, 4),
            }
        )
    return found


def _bandwidth(device: torch.device) -> float:
    """Fastest streaming read in GB/s (1e9 bytes per second) of the memory the model lies in."""
    if device.type != "cuda":
        return read_bandwidth()
    buffer, times = torch.ones(2**28, device=device, dtype=torch.float32), []
    for _ in range(5):
        torch.cuda.synchronize(device)
        begin = perf_counter()
        buffer.sum()
        torch.cuda.synchronize(device)
        times.append(perf_counter() - begin)
    return buffer.nbytes / min(times) / 1e9


def _sizes(models: dict[str, LanguageModel]) -> dict[str, int]:
    return {precision: weight_bytes(model) for precision, model in models.items()}
