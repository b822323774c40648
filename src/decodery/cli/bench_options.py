"""The options of `decodery bench`, which the benchmarks of this repository share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .command import option
from .options import OUT_FILE, OUT_FOLDER, recorded_import_option, together

PRECISIONS = ("float32", "bfloat16", "int8", "int4")


class Names(click.ParamType):
    """A list of names, separated by commas."""

    name = "LIST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(piece.strip() for piece in value.split(",") if piece.strip())


class Methods(Names):
    """A list of methods, separated by commas, each with its settings."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from decodery.bench.settings import split_methods

        if not (found := split_methods(value)):
            self.fail("there is no method in it: name some, such as none,auto", param, ctx)
        return found


class Integers(click.ParamType):
    """A list of integers, separated by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(piece) for piece in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers, such as 1,2,4", param, ctx)


class Numbers(click.ParamType):
    """A list of numbers, separated by commas."""

    name = "R,R,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(piece) for piece in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0.5,1,2", param, ctx)


def what_option(*names: str, **settings: Any) -> Any:
    return option(*names, heading="What to measure", **settings)


def _how(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Decoding", **settings)


def load_option(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Servers", **settings)


def result_option(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Results", **settings)


PATH = click.Path(path_type=Path)


measure_options = together(
    what_option(
        "-m",
        "--model",
        metavar="NAME",
        show_default="smollm2",
        help="A model: an embedded one, a folder, a .gguf file or a Hub id.",
    ),
    what_option(
        "--dtype",
        type=click.Choice(["auto", *PRECISIONS, "float16"]),
        show_default="auto",
        help="Precision of the weights. auto: that of the checkpoint.",
    ),
    what_option(
        "--methods",
        type=Methods(),
        show_default="none,prompt-lookup",
        help="Methods to compare: drafters with their settings, such as none,prompt-lookup:length=5.",
    ),
    what_option(
        "--workload",
        "workloads",
        type=Names(),
        show_default="built-in",
        help="Prompts to decode: built-in, copy, or with --data spec-bench, speed, code, math, json, jsonschema.",
    ),
    recorded_import_option,
    what_option(
        "--try",
        "requests",
        multiple=True,
        metavar="OPTIONS",
        help="Options of decodery generate to measure as well, such as '--drafter auto --acceptance-rule typical' or "
        "'--search beam:width=4'. Repeatable.",
    ),
    what_option(
        "--answer",
        type=click.Choice(["auto", "number", "marked", "whole", "choice", "quantity"]),
        show_default="auto",
        help="Where answers stand in texts, if FILE tells the right ones.",
    ),
    what_option(
        "--data",
        metavar="DIR",
        envvar="DECODERY_DATA",
        help="Folder with the public data sets; also the variable DECODERY_DATA.",
    ),
    what_option(
        "--prompts", type=int, metavar="N", show_default="all built-in ones, 40 of others", help="Prompts per workload."
    ),
    what_option(
        "--split",
        "splits",
        type=Names(),
        show_default="qualitative",
        help="qualitative: one prompt at a time. throughput: several prompts of one length at once.",
    ),
    what_option(
        "--concurrency", type=Integers(), show_default="1,2,4,8", help="Prompts at once in the throughput split."
    ),
    what_option(
        "--input-tokens",
        type=Integers(),
        show_default="64,256,512,1024",
        help="Prompt lengths of the throughput split.",
    ),
    _how(
        "--max-new-tokens",
        type=int,
        metavar="N",
        show_default="96; jsonschema 512",
        help="Maximum tokens of an answer.",
    ),
    _how(
        "--max-draft-tokens",
        type=int,
        metavar="N",
        show_default="80",
        help="Draft at most N tokens per step and prompt.",
    ),
    _how("--temperature", type=float, metavar="T", show_default="0", help="Sampling temperature. 0: greedy decoding."),
    _how(
        "--seed",
        type=int,
        metavar="N",
        show_default="0",
        help="Seed of the texts, the order of prompts and the intervals.",
    ),
    _how("--rounds", type=int, metavar="N", show_default="3", help="Number of rounds."),
    result_option("--out", type=OUT_FOLDER, metavar="DIR", help="Write DIR/results.json and DIR/report.html."),
    *(
        result_option(f"--{name}", type=OUT_FILE, metavar="FILE", help=what)
        for name, what in (
            ("csv", "Write all figures to FILE."),
            ("latex", "Write the tables to FILE."),
            ("svg", "Draw the speed-ups."),
        )
    ),
    result_option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
    result_option(
        "--from",
        "source",
        type=PATH,
        metavar="FILE",
        help="Repeat the benchmark of a result file. Other options replace its settings.",
    ),
    result_option("--resume", is_flag=True, help="Continue the interrupted benchmark in --out."),
)
"""The options of a measurement of methods."""
