"""A benchmark of ways of filling canvases, from its settings to its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

import decodery
from decodery.bench.metrics import wilson
from decodery.bench.result import Result, heading
from decodery.core.registry import resolve
from decodery.diffusion.canvas import Canvas
from decodery.llm.llm import LLM
from decodery_benchmarks.kinds import CANVASES
from decodery_benchmarks.report import save

from .released import is_released, released
from .released_scores import ModelJudge
from .settings import CanvasSettings
from .tasks import SEVERAL, Item, drawn, knows_letters, published, room

_DRAWS = 20
_TOGETHER = 64


def measure(
    lm: LLM,
    settings: CanvasSettings,
    out: Path | None = None,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
    stopped: Callable[[], bool] = lambda: False,
    earlier: Result | None = None,
) -> Result:
    """Fill canvases by every method; returns the result, and writes it after each where `out` is a folder.

    stopped: asked before every method; what is done is kept, and `complete` is then false. earlier: an interrupted
    result of the same settings, whose methods are not measured again.
    """
    begin = monotonic()
    items = _items(lm, settings)
    length = settings.max_new_tokens or room(lm, settings.tasks, settings.letters)
    rows: list[dict[str, Any]] = [] if earlier is None else list(earlier["rows"])
    done = list(dict.fromkeys(row["method"] for row in rows))

    def found() -> Result:
        complete, seconds = len(done) == len(settings.methods), monotonic() - begin
        head = heading(CANVASES, lm, settings.to_dict(), complete=complete, seconds=seconds, before=earlier)
        return head | {"places": length, "rows": rows}

    result = found()
    for number, method in enumerate(settings.methods):
        if method in done:
            continue
        if stopped():
            break
        report(method, number, len(settings.methods))
        rows += _rows(lm, settings, method, items, length)
        done.append(method)
        save(result := found(), out)
    return result


def _items(lm: LLM, settings: CanvasSettings) -> list[Item]:
    data = None if settings.data is None else Path(settings.data)
    if is_released(settings.tasks[0]):
        judge = None if settings.judge is None else ModelJudge(decodery.load(settings.judge))
        return released(settings.tasks, settings.prompts, data, judge)
    if knows_letters(lm):
        return drawn(settings.tasks, settings.prompts, settings.letters, settings.seed)
    return published(settings.tasks, settings.prompts, data)


def _rows(lm: LLM, settings: CanvasSettings, method: str, items: Sequence[Item], length: int) -> list[dict[str, Any]]:
    """A row for each task."""
    found: dict[str, list[tuple[float, Canvas]]] = {task: [] for task in settings.tasks}
    filling = resolve("diffusion", method)
    for first in range(0, len(items), _TOGETHER):
        some, engine = items[first : first + _TOGETHER], lm.engine()
        fills = [
            lm.fill(
                lm.encode(each.prompt, apply_chat_template=each.apply_chat_template), filling, length,
                temperature=settings.temperature, seed=settings.seed,
            )
            for each in some
        ]  # fmt: skip
        begun = [lm.begin(engine, fill) for fill in fills]
        engine.run([each.work for each in begun])
        for item, each in zip(some, begun, strict=True):
            found[item.task].append((item.right(each.output()), each.canvas))
    return [_row(lm, settings, method, task, runs, items, length) for task, runs in found.items() if runs]


def _row(
    lm: LLM,
    settings: CanvasSettings,
    method: str,
    task: str,
    runs: Sequence[tuple[float, Canvas]],
    items: Sequence[Item],
    length: int,
) -> dict[str, Any]:
    """right: answers that are, or the sum of scores; low, high: the 95 % interval (Wilson). passes, rows, pairs: means.

    tokens_per_pass: tokens up to the first end and with it. tau: of the order of writing, see `kendall`. distinct: of
    20 draws at temperature 1 to one prompt, for tasks with several answers.
    """
    count, right = len(runs), sum(good for good, _ in runs)
    low, high = wilson(right, count)
    canvases = [canvas for _, canvas in runs]
    passes = sum(canvas.passes for canvas in canvases)
    row: dict[str, Any] = {
        "method": method,
        "task": task,
        "prompts": count,
        "right": right,
        "low": round(low, 4),
        "high": round(high, 4),
        "passes": round(passes / count, 3),
        "rows": round(sum(canvas.rows for canvas in canvases) / count, 2),
        "pairs": round(sum(canvas.pairs for canvas in canvases) / count, 1),
        "experts": round(sum(canvas.experts for canvas in canvases) / passes, 2),
        "tokens_per_pass": round(sum(len(canvas.output) for canvas in canvases) / passes, 4),
        "tau": round(float(np.mean([kendall(canvas) for canvas in canvases])), 4),
    }
    if task in SEVERAL:
        item = next(each for each in items if each.task == task)
        drawn = lm.diffuse(
            item.prompt,
            method,
            apply_chat_template=item.apply_chat_template,
            n=_DRAWS,
            max_new_tokens=length,
            temperature=1.0,
            seed=settings.seed,
        )
        assert isinstance(drawn, list)
        row["distinct"] = len({tuple(each.tokens) for each in drawn})
    return row


def kendall(canvas: Canvas) -> float:
    """How far an output was written from left to right: 1 is all, -1 the other way round, 0 neither or all at once.

    Of all pairs of its places the share written in the order in which they stand, less that of the opposite order.
    """
    start = canvas.prompt_length
    passes = canvas.written[start : start + len(canvas.output)]
    n = len(passes)
    signs = np.sign(passes[None, :] - passes[:, None])[np.triu_indices(n, 1)]
    return float(signs.mean()) if n > 1 else 0.0
