"""What commands that train share: options, progress with an estimate, and an end that is a pause."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from .command import option
from .options import OUT_FOLDER

if TYPE_CHECKING:
    from decodery.models.loaders.store import Progress
    from decodery.training.kind import Run

_MEASURED_SECONDS, _MEASURED_PARTS = 10.0, 20
"""How long something must have gone on before anything is said of its end, and into how many such parts it falls."""

HOURS = "hours.json"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
out_option = option("--out", required=True, type=OUT_FOLDER, help="Output folder.")


def check_seed(ctx: click.Context, param: click.Parameter, value: int) -> int:
    """A seed. Raises BadParameter for one that generators do not take."""
    if not 0 <= value < 1 << 64:
        raise click.BadParameter(f"{value} is not an integer from 0 to 2^64 - 1", ctx, param)
    return value


@contextmanager
def resumable(out: Path) -> Iterator[Progress]:
    """Shows progress and says how long it takes; after Ctrl-C it says that the same command goes on from `out`."""
    from decodery.models.loaders.store import terminal_progress

    try:
        with terminal_progress(counts=True) as progress:
            yield with_time_left(progress)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command continues from {out}", err=True)
        raise


def with_time_left(progress: Progress) -> Progress:
    """`progress` that says once of everything that takes minutes how many, by how long what is done took."""
    begun: dict[str, tuple[int, float]] = {}
    told = set()

    def report(what: str, done: int, total: int) -> None:
        progress(what, done, total)
        first, start = begun.setdefault(what, (done, monotonic()))
        spent = monotonic() - start
        # The first steps of some are slower than the rest, and tell too little.
        if what in told or spent < _MEASURED_SECONDS or _MEASURED_PARTS * (done - first) < total:
            return
        told.add(what)
        minutes = round(spent / (done - first) * (total - done) / 60)
        if minutes:
            click.echo(f"{what}: {done:,} of {total:,} done, about {minutes:,} min more", err=True)

    return report


def within(progress: Progress, hours: float) -> Progress:
    """`progress` that ends the command as Ctrl-C does once so many hours are over."""
    end = monotonic() + 3600 * hours

    def report(what: str, done: int, total: int) -> None:
        progress(what, done, total)
        if monotonic() > end:
            raise KeyboardInterrupt

    return report


class Clock:
    """The hours of a command over all of its interruptions, kept with its checkpoints or its texts.

    Args:
        run: What the command runs; None where it writes nothing.
    """

    def __init__(self, run: Run | None) -> None:
        from decodery.models.loaders.fields import read_json

        self._path = None if run is None else run.training / HOURS
        self._begins = [] if run is None else [run.training, run.out / "text"]
        self._begun = self._kept = monotonic()
        self._before = float(read_json(self._path)) if self._path and self._path.is_file() else 0.0

    @property
    def hours(self) -> float:
        """How many there were until now."""
        return self._before + (monotonic() - self._begun) / 3600

    def keep(self) -> None:
        """Write them down."""
        from decodery.models.loaders.store import write_text

        # A command that keeps nothing starts again, and so do its hours.
        if self._path and any(folder.is_dir() for folder in self._begins):
            write_text(self._path, json.dumps(self.hours))
        self._kept = monotonic()

    def kept(self, progress: Progress) -> Progress:
        """`progress` that writes them down now and then."""

        def report(what: str, done: int, total: int) -> None:
            if monotonic() - self._kept > _MEASURED_SECONDS:
                self.keep()
            progress(what, done, total)

        return report


def command_line() -> str:
    """The command as it was given, for the facts about what it makes."""
    program = Path(sys.argv[0])
    is_script = program.suffix == ".py" and program.stem != "__main__"
    return shlex.join([*(["python", sys.argv[0]] if is_script else ["decodery"]), *sys.argv[1:]])
