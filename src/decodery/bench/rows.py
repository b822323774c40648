"""From what was measured of every prompt to one row per method, workload and category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .metrics import acceptance, macro, merge, speed_up, tokens_per_second, wilson
from .record import Record, timed
from .settings import PLAIN, Settings
from .structured import Schema, figures
from .subject import PARTS

ALL = "all"


def make_rows(
    records: Iterable[Record], settings: Settings, notes: dict[str, str], schemas: Sequence[Schema] = ()
) -> list[dict[str, Any]]:
    """The rows of a result: per workload and split, per method, the sum ("all") first, then every category.

    notes: {method: one line}; a method that was not measured gets a row that holds its note and no figures. schemas:
    those that answers were held to, refused ones too; their rows have the figures of `structured.figures` as well.
    """
    sets: dict[tuple[str, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        sets[record.prompt.workload, record.prompt.split][record.method].append(record)
    rows: list[dict[str, Any]] = []
    for (workload, split), methods in sets.items():
        plain = methods.get(PLAIN, [])
        for method, measured in methods.items():
            head = {"method": method, "workload": workload, "split": split, "temperature": settings.temperature}
            extra = {"store": measured[0].store, "dtype": measured[0].dtype, "note": notes.get(method, "")}
            categories = list(dict.fromkeys(record.prompt.category for record in measured))
            for category in (ALL, *categories):
                chosen, reference = _of(measured, category), _of(plain, category)
                tried = [schema for schema in schemas if category in (ALL, schema.category)]
                more = {**figures(chosen, tried), **_quality(chosen), **extra}
                rows.append({**head, "category": category, **_figures(chosen, reference, settings.seed), **more})
        missing = [method for method in notes if method not in methods]
        rows += [_empty(method, workload, split, settings.temperature, notes[method]) for method in missing]
    return rows


def _quality(records: Sequence[Record]) -> dict[str, Any]:
    """How many answers are right, with a 95 % interval; nothing where nothing tells."""
    told = [record.right for record in records if record.right is not None]
    if not told:
        return {}
    low, high = wilson(sum(told), len(told))
    return {"right": sum(told), "answered": len(told), "right_low": round(low, 4), "right_high": round(high, 4)}


def _of(records: Sequence[Record], category: str) -> list[Record]:
    return [record for record in records if category in (ALL, record.prompt.category)]


def _figures(records: list[Record], plain: list[Record], seed: int) -> dict[str, Any]:
    """All that is derived from the records of a method and, for the same prompts, of plain decoding."""
    emitted = merge(record.emitted for record in records)
    tokens = sum(record.new_tokens[0] for record in records)
    passes, fed = (sum(getattr(record, name)[0] for record in records) for name in ("passes", "rows"))
    ours, theirs = _by_question(records), _by_question(plain)
    both = [
        (a, b) for question, group in theirs.items() if (a := timed(group)) and (b := timed(ours.get(question, [])))
    ]
    speed = speed_up([a for a, _ in both], [b for _, b in both], seed=seed)
    own = [each for group in ours.values() if (each := timed(group))]
    per_prompt = [record.new_tokens[0] / record.passes[0] for record in records if record.passes[0]]
    return {
        "prompts": sum(record.prompts for record in records),
        "new_tokens": tokens,
        "passes": passes or None,
        "tokens_per_pass": _rounded(tokens / passes if passes else None),
        "rows_per_token": _rounded(fed / tokens if fed and tokens else None),
        "tokens_per_second": _rounded(tokens_per_second(own), 2) if own else None,
        "speedup": _rounded(speed.value if speed else None),
        "speedup_low": _rounded(speed.low if speed else None),
        "speedup_high": _rounded(speed.high if speed else None),
        "share": _share(records),
        "lossless": {name: sum(getattr(record, name) for record in records) for name in _COUNTS},
        "tokens_per_pass_macro": _rounded(macro(per_prompt)) if per_prompt else None,
        "acceptance": [round(rate, 4) for rate in acceptance(emitted)],
        "emitted": {str(count): times for count, times in emitted.items()},
        "prefill_seconds": _rounded(median(record.prefill_seconds[0] for record in records)),
    }


_COUNTS = ("checked", "identical", "excused")


def _by_question(records: Iterable[Record]) -> dict[str, list[Record]]:
    questions: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        questions[record.prompt.question].append(record)
    return questions


def _share(records: list[Record]) -> dict[str, float | None]:
    """Which part of the decoding time each of the four steps took; None where a method has no such steps."""
    total = {part: sum(record.parts[part] for record in records if record.parts) for part in PARTS}
    whole = sum(total.values())
    return {part: round(total[part] / whole, 4) if whole else None for part in PARTS}


def _empty(method: str, workload: str, split: str, temperature: float, note: str) -> dict[str, Any]:
    figures = ("new_tokens", "passes", "tokens_per_pass", "rows_per_token", "tokens_per_second")
    return {
        "method": method,
        "workload": workload,
        "category": ALL,
        "split": split,
        "temperature": temperature,
        "prompts": 0,
        **dict.fromkeys((*figures, "speedup", "speedup_low", "speedup_high")),
        "share": dict.fromkeys(PARTS),
        "lossless": dict.fromkeys(_COUNTS, 0),
        "store": "",
        "dtype": None,
        "note": note,
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
