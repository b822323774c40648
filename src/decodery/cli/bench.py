"""`decodery bench`: what a method is worth on this machine."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .bench_options import PRECISIONS, bench_options
from .command import command
from .decode import leave_if_terminated, note, stop_on_interrupt

if TYPE_CHECKING:
    from decodery.bench.result import Result
    from decodery.bench.settings import Settings
    from decodery.models.protocol import LanguageModel

_INTERRUPTED = 130
_LONG = 512
_ALONE = {"search": "search", "monitors": "monitors", "parallelbench": "canvases", "long-context": "long_context"}
"""Workloads that are measured alone, and what of `bench_` measures each."""
_OWN = {
    "--serve": {"rates", "trace", "first_token_limit", "gap_limit"},
    "--workload search": {"puzzle", "rewards", "budgets", "pool"},
    "--workload parallelbench": {"tasks", "letters"},
    "--workload long-context": {"shares"},
}
"""Options that one way of measuring alone knows."""
_APART = ("--compare", "--from", "--pass", "--rows", "--serve", "--sweep")
"""What each of these ways goes without."""


@command(example="bench -m smollm2 --methods none,prompt-lookup,auto --prompts 8 --out result")
@bench_options
def bench(
    out: Path | None,
    as_json: bool,
    source: Path | None,
    resume: bool,
    compare: tuple[Path, Path] | None,
    passes: bool,
    rows: tuple[int, ...] | None,
    serve: str | None,
    sweep: tuple[str, ...] | None,
    **options: Any,
) -> None:
    """Measure decoding methods against plain decoding, on the same prompts and in the same run.

    Ctrl-C stops after the current text and keeps the results.
    """
    given = {name: value for name, value in options.items() if value is not None}
    workloads = given.get("workloads", ())
    ways: dict[str, Any] = {f"--workload {name}": name for name in _ALONE if name in workloads}
    ways |= {"--serve": serve} if serve is not None else {}
    ways |= {"--sweep": sweep} if sweep is not None else {}
    for way, theirs in _OWN.items():
        if (strange := sorted(given.keys() & theirs)) and way not in ways:
            raise click.UsageError(f"--{strange[0].replace('_', '-')} needs {way}")
    for way in ways:
        if len(ways) > 1:
            raise click.UsageError(f"{' and '.join(ways)} exclude each other: give one of them")
        if compare or source or passes or rows is not None:
            others = [name for name in _APART if name != way]
            raise click.UsageError(f"{way} excludes {', '.join(others)}")
    if sweep is not None:
        from .bench_sweep import sweep as measured_sweep

        measured_sweep(sweep, given, out, as_json=as_json, resume=resume)
    elif serve is not None:
        from .bench_serve import measure

        result = measure(serve, given, out, as_json=as_json, resume=resume)
        _ended(result, out, "decodery bench --serve" + (f" {serve}" if serve else ""))
    elif ways:
        ((way, name),) = ways.items()
        alone = import_module(f".bench_{_ALONE[name]}", __package__)
        _ended(alone.measure(given, out, as_json=as_json, resume=resume), out, f"decodery bench {way}")
    elif compare:
        _compare(compare, as_json)
    elif passes:
        _passes(given, rows, out, as_json)
    elif rows is not None:
        raise click.UsageError("--rows needs --pass")
    else:
        _methods(given, out, as_json, source, resume)


def _methods(given: dict[str, Any], out: Path | None, as_json: bool, source: Path | None, resume: bool) -> None:
    from decodery import load
    from decodery.bench.job import Job, check_methods
    from decodery.bench.result import summary
    from decodery.bench.terminal import progress_bar, show

    settings, earlier = _settings(given, out, source, resume)
    check_methods(settings.methods)
    lm = load(settings.model, dtype=settings.dtype)
    with stop_on_interrupt() as stopped, progress_bar() as report:
        result = Job(lm, settings, out, earlier).run(report, stopped)
    if as_json:
        click.echo(json.dumps(summary(result), ensure_ascii=False))
    else:
        show(result)
    _ended(result, out, "decodery bench")


def _ended(result: Result, out: Path | None, command: str = "") -> None:
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
    from decodery.bench.peers import installed
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
    default = Settings()
    return Settings(**{"methods": (*default.methods, *installed()), **given}), None


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
