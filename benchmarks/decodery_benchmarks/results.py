"""Result files of benchmarks: one schema for all, written whole and read back."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decodery.bench.result import stamp
from decodery.models.loaders.store import write_text

RESULTS = Path(__file__).parents[1] / "results"
SCHEMA = Path(__file__).with_name("results.schema.json")
LAW = (
    "intercept",
    "slope",
    "slopes",
    "slope_interval",
    "slope_intervals",
    "r2",
    "values",
    "next",
    "held_out",
    "foretold",
)
"""What a law of drafts is made of, in a result."""
_ENVELOPE = ("schema", "kind", "command", "commit", "created", "complete", "machine", "settings", "rows", "summary")


class Result(dict[str, Any]):
    """A result file. A name that is not at the top level is looked up in `settings` and `summary`.

    `rows` is a mapping by name where the file's rows have names, else a list.
    """

    def __missing__(self, name: str) -> Any:
        for part in ("settings", "summary"):
            if name in self.setdefault(part, {}):
                return self[part][name]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or any(name in self.setdefault(part, {}) for part in ("settings", "summary"))

    def get(self, name: str, default: Any = None) -> Any:
        """What has this name, or `default`."""
        try:
            return self[name]
        except KeyError:
            return default

    @property
    def figures(self) -> dict[str, Any]:
        """What was found, by name: the rows, and the summary."""
        return {**self.get("summary", {}), **self["rows"]}


def read_result(path: Path) -> Result:
    """The result in a file."""
    found = Result(json.loads(path.read_text(encoding="utf-8")))
    rows = found["rows"]
    if all("name" in row for row in rows):
        found["rows"] = {row.pop("name"): row for row in rows}
    return found


def begun_result(path: Path) -> Result:
    """The result in a file, to go on from, or an empty one whose rows have names."""
    return read_result(path) if path.is_file() else Result(settings={}, rows={}, summary={})


def write_result(
    path: Path, found: Mapping[str, Any], summary: Sequence[str] = (), figures: Mapping[str, Any] | None = None
) -> None:
    """Write what a script found, whole.

    Args:
        path: The result file.
        found: `rows`, a list or a mapping by name; facts under other names, and under `settings`; `command`, by default
            the process's own.
        summary: The names in `found` that are results. All others are settings.
        figures: In place of rows: by name, what was measured of each cell, as a mapping, and results over all.
    """
    rest = {name: value for name, value in found.items() if name not in _ENVELOPE}
    rows, over_all = found.get("rows", []), dict[str, Any]()
    if figures is not None:
        rows = {name: value for name, value in figures.items() if isinstance(value, Mapping)}
        over_all = {name: value for name, value in figures.items() if name not in rows}
    if isinstance(rows, Mapping):
        rows = [{"name": name, **row} for name, row in rows.items()]
    result = {
        **stamp(script()),
        **({"complete": found["complete"]} if "complete" in found else {}),
        "command": found.get("command") or shlex.join(["python", *sys.argv]),
        "settings": found.get("settings", {}) | {name: value for name, value in rest.items() if name not in summary},
        "rows": rows,
        "summary": found.get("summary", {}) | {name: rest[name] for name in summary if name in rest} | over_all,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, dumped(result))


def dumped(result: Mapping[str, Any]) -> str:
    """JSON with a line for every row."""
    lines = [f"{json.dumps(name)}: {_dumped(value)}" for name, value in result.items() if name != "rows"]
    rows = ",\n  ".join(map(_dumped, result["rows"]))
    return "{\n " + ",\n ".join([*lines, f'"rows": [\n  {rows}\n ]' if rows else '"rows": []']) + "\n}\n"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def validate(result: Mapping[str, Any]) -> None:
    """Raise jsonschema.ValidationError for what is no result file."""
    import jsonschema

    jsonschema.validate(result, json.loads(SCHEMA.read_text(encoding="utf-8")))


def script() -> str:
    """The kind of a result: the name of the script that makes it."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(RESULTS.parent).with_suffix("")) if RESULTS.parent in path.parents else path.stem
