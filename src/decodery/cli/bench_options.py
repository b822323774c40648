"""The options of `decodery bench`, shown under headings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .command import option
from .options import OUT_FOLDER, recorded_import_option, together

PRECISIONS = ("float32", "bfloat16", "int8", "int4")


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
            self.fail(f"{value!r} is not a list of integers, such as 1,2,4", param, ctx)


class _Rates(click.ParamType):
    """A list of numbers, separated by commas."""

    name = "R,R,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(piece) for piece in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers, such as 0.5,1,2", param, ctx)


def _what(*names: str, **settings: Any) -> Any:
    return option(*names, heading="What to measure", **settings)


def _how(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Decoding", **settings)


def _search(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Workload search", **settings)


def _lists(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Workload parallelbench", **settings)


def _contexts(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Workload long-context", **settings)


def _load(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Servers", **settings)


def _result(*names: str, **settings: Any) -> Any:
    return option(*names, heading="Results", **settings)


_PATH = click.Path(path_type=Path)

bench_options = together(
    _what(
        "-m",
        "--model",
        metavar="NAME",
        show_default="smollm2",
        help="A model: an embedded one, a folder, a .gguf file or a Hub id.",
    ),
    _what(
        "--dtype",
        type=click.Choice(["auto", *PRECISIONS, "float16"]),
        show_default="auto",
        help="Precision of the weights. auto: that of the checkpoint.",
    ),
    _what(
        "--methods",
        type=_Methods(),
        show_default="none,prompt-lookup and the installed peers",
        help="Methods to compare, such as none,prompt-lookup:length=5. Drafters, and peers: transformers, "
        "transformers-lookup, llama.cpp, llama.cpp-q8, llama.cpp-lookup, llama.cpp-draft:model=FILE, openvino, "
        "openvino-lookup, economize, economize-lookup. For --workload search: pass@n, best-of-n, self-consistency, "
        "weighted-vote, first-finish, bag-of-tricks, or a search with {n} and {scorer} in it. For --workload "
        "monitors: the testbeds answers, context, talks, heads, feedback, codes, programs, recall.",
    ),
    _what(
        "--workload",
        "workloads",
        type=_Names(),
        show_default="built-in",
        help="Prompts to decode: built-in, copy, or with --data spec-bench, speed, code, math, json, jsonschema. Four "
        "workloads stand alone and measure other methods: search (searches on puzzles), monitors, parallelbench "
        "(diffusion decoders), long-context (KV cache policies, such as "
        "uniform,oracle,h2o,snapkv:budget={},window=8).",
    ),
    recorded_import_option,
    _what(
        "--data",
        metavar="DIR",
        envvar="DECODERY_DATA",
        help="Folder with the public data sets; also the variable DECODERY_DATA.",
    ),
    _what(
        "--prompts", type=int, metavar="N", show_default="all built-in ones, 40 of others", help="Prompts per workload."
    ),
    _what(
        "--split",
        "splits",
        type=_Names(),
        show_default="qualitative; test",
        help="qualitative: one prompt at a time. throughput: several prompts of one length at once. For --workload "
        "search the puzzles: test, validation, reward, router or train.",
    ),
    _what("--concurrency", type=_Numbers(), show_default="1,2,4,8", help="Prompts at once in the throughput split."),
    _what(
        "--input-tokens",
        type=_Numbers(),
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
    _result("--out", type=OUT_FOLDER, metavar="DIR", help="Write DIR/results.json and DIR/report.html."),
    _result("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
    _result(
        "--from",
        "source",
        type=_PATH,
        metavar="FILE",
        help="Repeat the benchmark of a result file. Other options replace its settings.",
    ),
    _result("--resume", is_flag=True, help="Continue the interrupted benchmark in --out."),
    _result("--compare", type=_PATH, nargs=2, metavar="A B", help="Compare two result files."),
    _search(
        "--puzzle",
        metavar="SPEC",
        show_default="chain",
        help="Puzzle: chain, retry-chain, direct-chain, countdown, dyck, robot, prog or kvhop, such as "
        "chain:operations=12.",
    ),
    _search(
        "--rewards",
        type=_Methods(),
        help="Reward models: oracle, outcome, clean, noisy, overconfident-early, hackable, constant, or scorers such "
        "as process-reward:head=FILE.",
    ),
    _search(
        "--budgets",
        type=_Numbers(),
        show_default="1,2,4,8,16",
        help="Samples of a method; {n} in a search stands for them.",
    ),
    _search("--pool", type=int, metavar="N", show_default="32", help="Samples of a puzzle."),
    _lists(
        "--tasks",
        type=_Names(),
        show_default="the ten on lists",
        help="Tasks: copy, shuffle, insert-index, ..., sudoku.",
    ),
    _lists(
        "--letters",
        type=int,
        metavar="N",
        show_default="6",
        help="Letters of the longest list, for models of decodery train diffusion.",
    ),
    _contexts(
        "--shares", type=_Rates(), show_default="0.1,0.25,0.5,1", help="Budgets of the policies, as shares of a text."
    ),
    option("--pass", "passes", heading="Forward passes", is_flag=True, help="Measure the time of forward passes."),
    option(
        "--rows", type=_Numbers(), heading="Forward passes", show_default="1,2,4,8,16,32,64", help="Rows of a pass."
    ),
    option(
        "--sweep",
        heading="Scaling laws",
        type=_Names(),
        metavar="LIST",
        help="Fit value = a + b ln(amount) over draft models or heads and an amount, such as training tokens: "
        "small=62000,more=125000,most=250000. Two amounts: small=62000/81536. batch: over --concurrency texts at "
        "once. --out receives law.json and law.svg.",
    ),
    _load(
        "--serve",
        is_flag=False,
        flag_value="",
        metavar="[URL]",
        help="Measure a server of the OpenAI API. Without a URL a server is started for --model. --workload may be "
        "sharegpt-like, --prompts counts the requests of a stage, --concurrency the clients.",
    ),
    _load("--rates", type=_Rates(), show_default="raised until answers are late", help="Requests per second."),
    _load(
        "--trace",
        metavar="FILE",
        help='File of recorded requests, a line each: {"at": SECONDS, "prompt": TEXT, "max_tokens": N}.',
    ),
    _load(
        "--first-token-limit",
        type=float,
        metavar="S",
        show_default="2",
        help="Limit of a good answer: seconds to the first token.",
    ),
    _load(
        "--gap-limit", type=float, metavar="S", show_default="0.2", help="Limit of a good answer: seconds per token."
    ),
)
