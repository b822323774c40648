"""The kinds of results of `benchmarks/bench.py`, and reading them."""

from __future__ import annotations

from pathlib import Path

from decodery.bench import result
from decodery.bench.result import KINDS, Kinds, Result

SEARCH, MONITORS, CANVASES, CONTEXTS = "search", "monitors", "canvases", "contexts"
_FIELDS: dict[str, type] = {"machine": dict, "model": dict, "settings": dict, "rows": list}
ALL: Kinds = {
    **KINDS,
    SEARCH: _FIELDS,
    MONITORS: _FIELDS | {"acts": list, "notes": list, "done": dict},
    CANVASES: _FIELDS,
    CONTEXTS: _FIELDS | {"full": dict},
}


def read(path: Path) -> Result:
    """The result of any kind in a file, or in the results.json of a folder. Raises CorruptFile where there is none."""
    return result.read(path, ALL)
