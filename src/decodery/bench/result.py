"""The result file: one JSON object that holds what was measured, how, where, and all a page is drawn from."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, DecoderyError
from decodery.core.machine import describe
from decodery.llm.llm import LLM
from decodery.models.footprint import precision, weight_bytes
from decodery.step.pass_cost import CostCurve

from .lossless import EPSILON
from .metrics import FEWEST
from .record import Record
from .rows import make_rows
from .settings import Settings
from .structured import Schema

SCHEMA = 1
"""Of result files; every file has these fields first, see `stamp`."""
_MOST_BYTES = 1 << 28

BENCHMARK, PASSES, LOAD = "benchmark", "passes", "load"
_BENCHMARK: dict[str, type] = {"machine": dict, "model": dict, "settings": dict, "rows": list, "generations": list}
_PASSES: dict[str, type] = {"machine": dict, "model": dict, "rows": list, "read_gb_per_s": float}
_LOAD: dict[str, type] = {"machine": dict, "model": dict, "settings": dict, "rows": list, "requests": list}
Kinds = Mapping[str, Mapping[str, type]]
KINDS: Kinds = {BENCHMARK: _BENCHMARK, PASSES: _PASSES, LOAD: _LOAD}
"""By kind of result: fields that every one has, and what they are."""

Result = dict[str, Any]
"""See `make_result` for a benchmark, `passes.measure` for the costs of passes, `load.job` for the load of servers."""


def stamp(kind: str) -> Result:
    """How, when and where a result was made. commit: of the working tree that this package lies in, else None."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(),
    }


@cache
def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        # Only of this project's own repository: an installed package may lie in another one.
        command = ["git", "ls-files", "--error-unmatch", Path(__file__).name]
        if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
            return None
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def make_result(
    lm: LLM,
    settings: Settings,
    records: list[Record],
    *,
    complete: bool,
    seconds: float,
    curve: CostCurve,
    unavailable: dict[str, str],
    notes: list[str],
    schemas: Sequence[Schema] = (),
) -> Result:
    """The object of a result file.

    machine, model, settings; rows: see `rows.make_rows`; generations: the records; cost_curve: rows and seconds of a
    pass; notes: sentences about what was left out; complete: false where the run was interrupted; epsilon: gap of
    logits below which a difference from plain decoding is excused as a near-tie; seconds: spent measuring; schemas:
    those that answers were held to, and why some could not be.
    """
    config = lm.model.config
    return {
        **stamp(BENCHMARK),
        "complete": complete,
        "seconds": round(seconds, 1),
        "model": {
            "name": lm.name,
            "dtype": lm.dtype,
            "precision": precision(lm.model),
            "weight_bytes": weight_bytes(lm.model),
            "vocab_size": lm.model.vocab_size,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "max_positions": config.max_positions,
            "device": str(lm.model.device),
        },
        "settings": settings.to_dict(),
        "epsilon": EPSILON.get(lm.dtype, 0.0),
        "cost_curve": {"rows": list(curve.rows), "seconds": [round(value, 6) for value in curve.times]},
        "notes": notes,
        "unavailable": unavailable,
        "rows": make_rows(records, settings, unavailable, schemas),
        **({"schemas": [schema.to_dict() for schema in schemas]} if schemas else {}),
        "generations": [record.to_dict() for record in records],
    }


def heading(
    kind: str, lm: LLM, settings: dict[str, Any], *, complete: bool, seconds: float, before: Result | None = None
) -> Result:
    """What a result of one loaded model says before its rows. before: the interrupted one it goes on from."""
    config = lm.model.config
    return {
        **stamp(kind),
        "complete": complete,
        "seconds": round(seconds + (0.0 if before is None else float(before["seconds"])), 1),
        "model": {"name": lm.name, "dtype": lm.dtype, "layers": config.num_layers, "hidden_size": config.hidden_size},
        "settings": settings,
    }


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DecoderyError(f"cannot write {path} ({error.strerror}): choose another folder with --out") from error


def dump(result: Result) -> str:
    """JSON with a line for every row and every generation, so that two files can be compared line by line."""
    lists = [name for name in ("rows", "generations", "requests") if name in result]
    lines = [f"{json.dumps(name)}: {_dumps(value)}" for name, value in result.items() if name not in lists]
    for name in lists:
        items = result[name]
        inner = ",\n  ".join(_dumps(item) for item in items)
        lines.append(f"{json.dumps(name)}: [\n  {inner}\n ]" if items else f"{json.dumps(name)}: []")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read(path: Path, kinds: Kinds = KINDS) -> Result:
    """The result in a file, or in the results.json of a folder; raises CorruptFile where it is of no such kind."""
    path = path / "results.json" if path.is_dir() else path
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CorruptFile(f"{path} is larger than any result file ({_MOST_BYTES >> 20} MiB)")
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorruptFile(f"cannot read {path} ({error.strerror}): give a results.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not JSON: give a results.json that `decodery bench` has written") from error
    kind = result.get("kind") if isinstance(result, dict) else None
    wanted = kinds.get(str(kind))
    if wanted is None or any(not isinstance(result.get(name), of) for name, of in wanted.items()):
        raise CorruptFile(f"{path} is not a result file: give a results.json that `decodery bench` has written")
    if result.get("schema") != SCHEMA:
        raise CorruptFile(f"{path} has the schema {result.get('schema')!r}, this version reads {SCHEMA}: run it again")
    return result


def require_benchmark(result: Result) -> Result:
    """The result itself if it is one of methods; raises CorruptFile for another kind."""
    return require(result, BENCHMARK)


def require_load(result: Result) -> Result:
    """The result itself if it is one of servers under load; raises CorruptFile for another kind."""
    return require(result, LOAD)


def require(result: Result, kind: str) -> Result:
    """The result itself if it is of this kind; raises CorruptFile for another."""
    if result["kind"] != kind:
        raise CorruptFile(f"that result is of the kind {result['kind']!r}, not {kind!r}: give another results.json")
    return result


def records_of(result: Result) -> list[Record]:
    """The generations of a result, to go on from."""
    return [Record.from_dict(raw) for raw in result["generations"]]


def compare(first: Result, second: Result) -> dict[str, Any]:
    """Two results side by side. differences: settings, machine and model facts that are not the same, as pairs.

    rows: those that either has, each with `first` and `second` (None where missing), the `ratio` of their speed-ups
    and `apart`: whether their intervals do not overlap.
    """
    keys = ("method", "workload", "split", "temperature", "category")
    sides = [{tuple(row.get(key) for key in keys): row for row in each["rows"]} for each in (first, second)]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(key) for side in sides]
        rows.append({**dict(zip(keys, key, strict=True)), "first": pair[0], "second": pair[1], **_against(*pair)})
    differences = {
        f"{part}.{name}": [first[part].get(name), second[part].get(name)]
        for part in ("machine", "model", "settings")
        for name in dict.fromkeys([*first[part], *second[part]])
        if first[part].get(name) != second[part].get(name)
    }
    return {"differences": differences, "rows": rows}


def _against(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    if first is None or second is None or not first.get("speedup") or not second.get("speedup"):
        return {"ratio": None, "apart": None}
    apart: bool | None = second["speedup_low"] > first["speedup_high"] or first["speedup_low"] > second["speedup_high"]
    if min(first["prompts"], second["prompts"]) < FEWEST:
        apart = None
    return {"ratio": round(second["speedup"] / first["speedup"], 4), "apart": apart}


def summary(result: Result) -> Result:
    """The result without its generations or requests, and without what it would be gone on with, for `--json`."""
    return {name: value for name, value in result.items() if name not in ("generations", "requests", "done")}
