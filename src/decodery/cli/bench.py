"""`decodery bench`: what a method is worth on this machine."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decodery.core.errors import SettingsError

from .decoding import leave_if_terminated, note, stop_on_interrupt
from .options import OUT_FOLDER, Command, Option, recorded_import_option

if TYPE_CHECKING:
    from decodery.bench.result import Result
    from decodery.bench.settings import Settings
    from decodery.models.protocol import LanguageModel

_INTERRUPTED = 130
_LONG = 512
_PRECISIONS = ("float32", "bfloat16", "int8", "int4")
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


class _Names(click.ParamType):
    """A list of names, separated by commas."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(piece.strip() for piece in value.split(",") if piece.strip())


class _Methods(_Names):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from decodery.bench.settings import split_methods

        return split_methods(value)


class _Numbers(click.ParamType):
    """A list of integers, separated by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(piece) for piece in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4", param, ctx)


class _Rates(click.ParamType):
    """A list of numbers, separated by commas."""

    name = "R,R,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(piece) for piece in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.5,1,2", param, ctx)


def _what(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="What is measured", **settings)


def _how(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="How", **settings)


def _search(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="Searches on puzzles", **settings)


def _lists(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="Canvases on ParallelBench's lists", **settings)


def _contexts(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="Cache policies on long texts", **settings)


def _load(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="Servers under load", **settings)


def _result(*names: str, **settings: Any) -> Any:
    return click.option(*names, cls=Option, heading="Results", **settings)


_PATH = click.Path(path_type=Path)


@click.command(cls=Command, short_help="Measure methods against plain decoding.")
@_what("-m", "--model", metavar="NAME", help="An embedded model, a folder, a .gguf file or a Hub id (smollm2).")
@_what("--dtype", type=click.Choice(["auto", *_PRECISIONS, "float16"]), help="Precision of the weights (auto).")
@_what(
    "--methods",
    type=_Methods(),
    help="Drafters, such as none,prompt-lookup:length=5, and peers: transformers, transformers-lookup, llama.cpp, "
    "llama.cpp-q8, llama.cpp-lookup, llama.cpp-draft:model=FILE, openvino, openvino-lookup, "
    "economize, economize-lookup (none, prompt-lookup and the installed peers). Of searches: pass@n, "
    "best-of-n, self-consistency, weighted-vote, first-finish, bag-of-tricks (six of a study) and specs with {n} and "
    "{scorer} in them. Of "
    "monitors their testbeds: answers, context, talks, heads, feedback, codes, programs, recall.",
)
@_what(
    "--workload",
    "workloads",
    type=_Names(),
    help="built-in, copy, or with --data: spec-bench, speed, code, math, json, jsonschema (built-in); search, alone: "
    "searches on puzzles; monitors, alone: what monitors tell; "
    "parallelbench, alone: ways of filling canvases, which --methods then are; long-context, alone: cache policies, "
    "which --methods then are, as in uniform,oracle,h2o,snapkv:budget={},window=8.",
)
@recorded_import_option
@_what("--data", metavar="DIR", envvar="DECODERY_DATA", help="Folder with the public sets [env: DECODERY_DATA].")
@_what("--prompts", type=int, metavar="N", help="Questions per workload (all built-in ones, 40 of another set).")
@_what(
    "--split",
    "splits",
    type=_Names(),
    help="qualitative: one question at a time; throughput: several prompts of one length at once (qualitative). Of "
    "--workload search, which puzzles: test, validation, reward, router or train (test).",
)
@_what("--concurrency", type=_Numbers(), help="Prompts at once in the throughput split (1,2,4,8).")
@_what("--input-tokens", type=_Numbers(), help="Lengths of its prompts (64,256,512,1024).")
@_how("--max-new-tokens", type=int, metavar="N", help="Longest answer (96; jsonschema 512).")
@_how("--max-draft-tokens", type=int, metavar="N", help="Draft at most N tokens per step and prompt (80).")
@_how("--temperature", type=float, metavar="T", help="0 is greedy (0).")
@_how("--seed", type=int, metavar="N", help="Decides texts, the order of questions and the intervals (0).")
@_how("--rounds", type=int, metavar="N", help="How often everything is measured (3).")
@_result("--out", type=OUT_FOLDER, metavar="DIR", help="Write DIR/results.json and DIR/report.html.")
@_result("--json", "as_json", is_flag=True, help="Print one object and nothing else.")
@_result("--from", "source", type=_PATH, metavar="FILE", help="Repeat a benchmark; options given here change it.")
@_result("--resume", is_flag=True, help="Go on with the interrupted benchmark in --out.")
@_result("--compare", type=_PATH, nargs=2, metavar="A B", help="Show two result files side by side.")
@_search(
    "--puzzle",
    metavar="SPEC",
    help="chain, retry-chain, direct-chain, countdown, dyck, robot, prog or kvhop, as in chain:operations=12 (chain).",
)
@_search(
    "--rewards",
    type=_Methods(),
    help="oracle, outcome, clean, noisy, overconfident-early, hackable, constant, or scorers such as "
    "process-reward:head=FILE.",
)
@_search("--budgets", type=_Numbers(), help="Samples of a method, and what {n} in a search stands for (1,2,4,8,16).")
@_search("--pool", type=int, metavar="N", help="Samples of a puzzle that methods are computed from (32).")
@_lists("--tasks", type=_Names(), help="copy, shuffle, insert-index, ..., sudoku: what is asked (all ten on lists).")
@_lists("--letters", type=int, metavar="N", help="Of the longest list, for models of decodery train diffusion (6).")
@_contexts("--shares", type=_Rates(), help="Their budgets, as shares of a text (0.1,0.25,0.5,1).")
@click.option("--pass", "passes", cls=Option, heading="Passes", is_flag=True, help="Measure forward passes instead.")
@click.option("--rows", type=_Numbers(), cls=Option, heading="Passes", help="Rows of a pass (1,2,4,8,16,32,64).")
@click.option(
    "--sweep",
    cls=Option,
    heading="Laws of drafts",
    type=_Names(),
    metavar="LIST",
    help="Drafts, or heads, with what differs between them, such as training tokens, as in "
    "small=62000,more=125000,most=250000; two amounts each, as small=62000/81536 (tokens and weights), or batch, at "
    "--concurrency texts at once. Fits "
    "value = a + b ln(amount); --out gets law.json and law.svg.",
)
@_load(
    "--serve",
    is_flag=False,
    flag_value="",
    metavar="[URL]",
    help="Measure a server with OpenAI's protocol; without a URL this model's own, which is started for it. --workload "
    "may be sharegpt-like, --prompts are requests per stage, --concurrency are clients that wait for their answers.",
)
@_load("--rates", type=_Rates(), help="Arrivals per second (raised until the service breaks).")
@_load("--trace", metavar="FILE", help='Recorded arrivals: lines of {"at": SECONDS, "prompt": TEXT, "max_tokens": N}.')
@_load("--first-token-limit", type=float, metavar="S", help="A good answer begins within S seconds (2).")
@_load("--gap-limit", type=float, metavar="S", help="And takes at most S seconds per token (0.2).")
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

    Ctrl-C ends after the decoding in progress and keeps what is done.
    """
    given = {name: value for name, value in options.items() if value is not None}
    workloads = given.get("workloads", ())
    ways: dict[str, Any] = {f"--workload {name}": name for name in _ALONE if name in workloads}
    ways |= {"--serve": serve} if serve is not None else {}
    ways |= {"--sweep": sweep} if sweep is not None else {}
    for way, theirs in _OWN.items():
        if (strange := sorted(given.keys() & theirs)) and way not in ways:
            raise click.UsageError(f"--{strange[0].replace('_', '-')} belongs to {way}")
    for way in ways:
        if len(ways) > 1:
            raise click.UsageError(f"{' and '.join(ways)} are measured one at a time")
        if compare or source or passes or rows is not None:
            others = [name for name in _APART if name != way]
            raise click.UsageError(f"{way} goes without {', '.join(others)}")
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
        raise click.UsageError("--rows belongs to --pass")
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
        note("interrupted" + (f"; go on with: {command} --resume --out {out}" if out is not None and command else ""))
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
            raise SettingsError(f"the benchmark in {out} has other settings: give none with --resume, or no --resume")
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
        raise SettingsError(f"the benchmark in {path} has methods of other modules: add {again}, which runs their code")


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
        raise click.UsageError(f"--pass has no use for --{strange[0].replace('_', '-')}")
    if rows is not None and (not rows or min(rows) < 1):
        raise SettingsError("--rows needs whole numbers of at least 1, such as 1,8,16")
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
    for each in _PRECISIONS if dtype == "auto" else (dtype,):
        try:
            model = load(name, dtype=each).model
        except (SettingsError, UnsupportedModel):
            if dtype != "auto":
                raise
            continue
        models[precision(model)] = model
    return models
