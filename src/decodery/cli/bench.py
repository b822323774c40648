"""`decodery bench`: what a method is worth on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .bench_options import PATH, PRECISIONS, Integers, Numbers, load_option, measure_options, result_option
from .bench_requests import requests_of
from .command import command, option
from .decode import leave_if_terminated, note, stop_on_interrupt

if TYPE_CHECKING:
    from decodery.bench.result import Result
    from decodery.bench.settings import Settings
    from decodery.bench.subject import Peers
    from decodery.models.protocol import LanguageModel

_INTERRUPTED = 130
_LONG = 512
_OF_SERVERS = {"rates", "trace", "first_token_limit", "gap_limit"}
"""Options that need --serve."""


@command(
    example="bench prompts.jsonl -m smollm2 --methods none,auto --out result\n"
    "bench prompts.jsonl --try '--drafter auto --acceptance-rule typical' --csv result.csv"
)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@measure_options
@result_option("--compare", type=PATH, nargs=2, metavar="A B", help="Compare two result files.")
@option("--pass", "passes", heading="Forward passes", is_flag=True, help="Measure the time of forward passes.")
@option("--rows", type=Integers(), heading="Forward passes", show_default="1,2,4,8,16,32,64", help="Rows of a pass.")
@load_option(
    "--serve",
    is_flag=False,
    flag_value="",
    metavar="[URL]",
    help="Measure a server of the OpenAI API. Without a URL a server is started for --model. --workload may be "
    "sharegpt-like, --prompts counts the requests of a stage, --concurrency the clients.",
)
@load_option("--rates", type=Numbers(), show_default="raised until answers are late", help="Requests per second.")
@load_option(
    "--trace",
    metavar="FILE",
    help='File of recorded requests, a line each: {"at": SECONDS, "prompt": TEXT, "max_tokens": N}.',
)
@load_option(
    "--first-token-limit",
    type=float,
    metavar="S",
    show_default="2",
    help="Limit of a good answer: seconds to the first token.",
)
@load_option(
    "--gap-limit", type=float, metavar="S", show_default="0.2", help="Limit of a good answer: seconds per token."
)
def bench(
    file: Path | None,
    out: Path | None,
    as_json: bool,
    source: Path | None,
    resume: bool,
    compare: tuple[Path, Path] | None,
    passes: bool,
    rows: tuple[int, ...] | None,
    serve: str | None,
    **options: Any,
) -> None:
    """Measure decoding methods against plain decoding, on the same prompts and in the same run.

    FILE has your own prompts: a JSON object a line, {"prompt": TEXT} or {"messages": [...]}, with an "answer" if right
    answers are to be counted. Without FILE the prompts are those of --workload. Ctrl-C stops after the current text and
    keeps the results.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if file is not None:
        if serve is not None or compare or passes or source:
            raise click.UsageError("FILE excludes --serve, --compare, --pass and --from")
        from decodery.bench.workloads import OWN, digest_of

        given |= {"file": str(file), "digest": digest_of(file), "workloads": (OWN, *given.get("workloads", ()))}
    if serve is None and (strange := sorted(given.keys() & _OF_SERVERS)):
        raise click.UsageError(f"--{strange[0].replace('_', '-')} needs --serve")
    if serve is not None and (compare or source or passes or rows is not None):
        raise click.UsageError("--serve excludes --compare, --from, --pass and --rows")
    if serve is not None:
        from .bench_serve import measure

        result = measure(serve, given, out, as_json=as_json, resume=resume)
        ended(result, out, "decodery bench --serve" + (f" {serve}" if serve else ""))
    elif compare:
        _compare(compare, as_json)
    elif passes:
        _passes(given, rows, out, as_json)
    elif rows is not None:
        raise click.UsageError("--rows needs --pass")
    else:
        measure_methods(given, out, as_json, source, resume)


def measure_methods(
    given: dict[str, Any],
    out: Path | None,
    as_json: bool,
    source: Path | None,
    resume: bool,
    peers: Peers | None = None,
    command: str = "decodery bench",
) -> None:
    """Measure methods, show what came of it and write it to `out`.

    Args:
        given: Settings of the benchmark, by name.
        out: The folder for the files, None to write none.
        as_json: Whether one JSON object is printed instead of tables.
        source: A result file whose benchmark is repeated.
        resume: Whether the interrupted benchmark in `out` continues.
        peers: Other programs that methods may name.
        command: The command that continues an interrupted benchmark, without --resume and --out.
    """
    from decodery import load
    from decodery.bench import exports
    from decodery.bench.job import Job
    from decodery.bench.result import summary, write
    from decodery.bench.subject import NO_PEERS, check_methods
    from decodery.bench.terminal import progress_bar, show

    peers = peers or NO_PEERS
    files = {name: given.pop(name) for name in ("csv", "latex", "svg") if name in given}
    settings, earlier = _settings(given, out, source, resume)
    check_methods(settings.methods, peers)
    requests = requests_of(settings.requests)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = Job(lm, settings, out, earlier, peers, requests).run(report, stopped)
    for name, path in files.items():
        write(path, getattr(exports, f"to_{name}")(result))
        note(f"wrote {path}")
    if as_json:
        click.echo(json.dumps(summary(result), ensure_ascii=False))
    else:
        show(result)
    ended(result, out, command)


def ended(result: Result, out: Path | None, command: str = "") -> None:
    """Say where everything is; leave with the status of an interruption where it was one. command: goes on with it."""
    if out is not None:
        note(f"wrote {out / 'results.json'} and {out / 'report.html'}")
    if not result["complete"]:
        note(
            "interrupted" + (f"; continue with: {command} --resume --out {out}" if out is not None and command else "")
        )
        leave_if_terminated()
        raise click.exceptions.Exit(_INTERRUPTED)


def _settings(
    given: dict[str, Any], out: Path | None, source: Path | None, resume: bool
) -> tuple[Settings, Result | None]:
    """What to measure, and the interrupted result to go on from."""
    from decodery.bench.result import read, require_benchmark
    from decodery.bench.settings import Settings

    if resume:
        if out is None or source is not None:
            raise click.UsageError("--resume needs --out, the folder of the interrupted benchmark, and no --from")
        earlier = require_benchmark(read(out))
        settings = Settings.from_dict(earlier["settings"])
        # The data folder may come from the environment, and that of the file is the one that counts.
        _require_imports(settings, given, out)
        if dataclasses.replace(settings, **given | {"data": settings.data, "imports": settings.imports}) != settings:
            raise SettingsError(
                f"the benchmark in {out} has other settings: give no other options with --resume, or leave out --resume"
            )
        if earlier["complete"]:
            raise SettingsError(f"the benchmark in {out} is complete: repeat it with --from {out}")
        return settings, earlier
    if source is not None:
        settings = Settings.from_dict(require_benchmark(read(source))["settings"])
        _require_imports(settings, given, source)
        return dataclasses.replace(settings, **given), None
    if "jsonschema" in given.get("workloads", ()):
        # What is cut is not valid.
        given.setdefault("max_new_tokens", _LONG)
    return Settings(**given), None


def _require_imports(settings: Settings, given: dict[str, Any], path: Path) -> None:
    """Whose methods came from elsewhere needs them again, from the user: code is never run because a file names it."""
    if settings.imports and "imports" not in given:
        again = " ".join(f"--import {name}" for name in settings.imports)
        raise SettingsError(
            f"the benchmark in {path} uses methods of other modules: add {again}, which runs their code"
        )


def _compare(paths: tuple[Path, Path], as_json: bool) -> None:
    from decodery.bench.result import compare, read, require_benchmark
    from decodery.bench.terminal import show_comparison

    first, second = (require_benchmark(read(path)) for path in paths)
    comparison = compare(first, second)
    if as_json:
        click.echo(json.dumps(comparison, ensure_ascii=False))
    else:
        show_comparison(comparison, (str(paths[0]), str(paths[1])))


def _passes(given: dict[str, Any], rows: tuple[int, ...] | None, out: Path | None, as_json: bool) -> None:
    from decodery.bench.passes import ROWS, measure
    from decodery.bench.report import save
    from decodery.bench.terminal import progress_bar, show_passes

    if strange := sorted(set(given) - {"model", "dtype", "data", "imports"}):
        raise click.UsageError(f"--pass does not take --{strange[0].replace('_', '-')}")
    if rows is not None and (not rows or min(rows) < 1):
        raise SettingsError("--rows takes integers of at least 1, such as 1,8,16")
    name = given.get("model", "smollm2")
    models = _load_precisions(name, given.get("dtype", "auto"))
    with progress_bar() as report:
        result = measure(models, name, rows or ROWS, report=lambda done, total: report("passes", done, total))
    save(result, out)
    if out is not None:
        note(f"wrote {out / 'results.json'} and {out / 'report.html'}")
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        show_passes(result)


def _load_precisions(name: str, dtype: str) -> dict[str, LanguageModel]:
    """The model in the precision asked for; for "auto" in every one it can be loaded in."""
    from decodery import load
    from decodery.core.errors import UnsupportedModel
    from decodery.models.footprint import precision

    models: dict[str, LanguageModel] = {}
    for each in PRECISIONS if dtype == "auto" else (dtype,):
        try:
            model = load(name, dtype=each).model
        except (SettingsError, UnsupportedModel):
            if dtype != "auto":
                raise
            continue
        models[precision(model)] = model
    return models
