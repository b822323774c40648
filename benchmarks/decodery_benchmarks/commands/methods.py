"""`benchmarks/bench.py methods`: `decodery bench` with other programs beside its methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodery.bench.settings import Settings
from decodery.cli.bench import measure_methods
from decodery.cli.bench_options import measure_options
from decodery.cli.command import command
from decodery_benchmarks.peers import installed, peers

from .workload import given_of


@command(example="")
@measure_options
def methods(out: Path | None, as_json: bool, source: Path | None, resume: bool, **options: Any) -> None:
    """Measure decoding methods and other programs, on the same prompts and in the same run.

    --methods also takes transformers, transformers-lookup, llama.cpp, llama.cpp-q8, llama.cpp-lookup,
    llama.cpp-draft:model=FILE, openvino, openvino-lookup, economize and economize-lookup. The default adds those that
    are installed.
    """
    given = given_of(options)
    if source is None and not resume:
        given.setdefault("methods", (*Settings().methods, *installed()))
    measure_methods(given, out, as_json, source, resume, peers(), "python benchmarks/bench.py methods")
