"""An experiment: the cells of a grid, each measured once and written at once, so that it can be interrupted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decodery.bench.terminal import progress_bar
from decodery.core.errors import SettingsError

from .results import Result, begun_result, read_result, write_result

Row = dict[str, Any]
Grid = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]


@dataclass
class Experiment:
    """What is measured, of which cells, and what is computed of all.

    Args:
        grid: The values of each coordinate, all of which are combined, or the cells themselves. A single coordinate
            `name` gives rows with names.
        run: Measures one cell, whose coordinates it takes as keywords. Returns its figures, or those of several rows.
        metrics: By name, what is computed of all rows, such as a mean with its interval.
        settings: What the figures hang on beside the cell.
    """

    grid: Grid
    run: Callable[..., Mapping[str, Any] | Sequence[Mapping[str, Any]]]
    metrics: Mapping[str, Callable[[list[Row]], Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def cells(self) -> list[Row]:
        """The coordinates of every cell, in the order of the grid."""
        if not isinstance(self.grid, Mapping):
            return [dict(cell) for cell in self.grid]
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    def measure(self, path: Path, command: str | None = None) -> Result:
        """Measure the cells that `path` lacks, and write the file whole after each.

        Args:
            path: The result file. One of the same settings is continued; rows of other cells stay.
            command: What repeats the measurement; by default the process's own command.

        Returns:
            The result as the file has it.

        Raises:
            SettingsError: For a file with other settings.
        """
        settings, cells = _plain(self.settings), [_plain(cell) for cell in self.cells()]
        rows = self._known(path, settings)
        left = [cell for cell in cells if not any(cell.items() <= row.items() for row in rows)]
        with progress_bar() as report:
            for number, cell in enumerate(left):
                report(", ".join(map(str, cell.values())), number, len(left))
                found = self.run(**cell)
                for figures in [found] if isinstance(found, Mapping) else found:
                    rows.append(cell | _plain(figures))
                    print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
                self._write(path, settings, rows, command)
        if not left:
            print(f"{path} has all cells: remove it to measure them again", flush=True)
        return read_result(path)

    def _known(self, path: Path, settings: Row) -> list[Row]:
        known = begun_result(path)
        if path.is_file() and known["settings"] != settings:
            raise SettingsError(f"{path} has other settings: choose another file, or remove it")
        rows = known["rows"]
        return [{"name": name, **row} for name, row in rows.items()] if isinstance(rows, dict) else list(rows)

    def _write(self, path: Path, settings: Row, rows: list[Row], command: str | None) -> None:
        metrics = {name: metric(rows) for name, metric in self.metrics.items()}
        write_result(path, {"command": command, "settings": settings, "rows": rows, "summary": metrics})


def _plain(value: Mapping[str, Any]) -> Row:
    """As JSON has it, so that what was read equals what is asked for."""
    plain: Row = json.loads(json.dumps(value))
    return plain
