"""Scripts of `benchmarks/` as tests run them: at sizes of seconds, with nothing written there."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import decodery
from decodery.models.loaders import load as loaders
from tiny_models import make_model, save

FOLDER = next(each for each in Path(__file__).parents if (each / "pyproject.toml").is_file()) / "benchmarks"

SIZES = {
    "tokens": 4, "new": 4, "max_new_tokens": 4, "texts": 1, "prompts": 1, "questions": 1, "count": 1, "rounds": 1,
    "repeats": 2, "again": 1, "steps": 2, "epochs": 1, "draws": 20, "turns": 1, "layers": 2, "batch": 2, "step": 1,
    "every": 1, "places": 1, "problems": 1, "pool": 2, "most": 1, "sentences": 1, "requests": 2, "aborts": 1,
    "timed": 1, "samples": 1, "length": 8, "windows": 1, "schemas": 2, "tasks": 1, "seeds": 1, "seconds": 1.0,
    "lengths": [16],
}  # fmt: skip
"""What options are where a test says nothing else."""
TEXT = "The tide comes in twice a day, and goes out as often. What makes it do so, and who found it out? " * 4
DATA: dict[str, list[dict[str, Any]]] = {
    "spec_bench_dev": [
        {"question_id": number, "category": category, "turns": [f"{number}. {TEXT}", "And why twice?"]}
        for number, category in enumerate(
            ("writing", "qa", "rag", "math_reasoning", "summarization", "translation", "extraction", "coding")
        )
    ],
    "gsm8k_train_1000": [
        {"question": f"Ann has {number} apples and buys 3. How many has she?", "answer": f"#### {number + 3}"}
        for number in range(24)
    ],
    "humaneval_dev": [
        {
            "task_id": f"HumanEval/{number}",
            "prompt": 'def more(n: int) -> int:\n    """ One more.\n    >>> more(1)\n    2\n    """\n',
            "entry_point": "more",
            "canonical_solution": "    return n + 1\n",
            "test": "def check(candidate):\n    assert candidate(3) == 4\n",
        }
        for number in range(2)
    ],
    "jsonschemabench_dev": [{"dataset": "Github_easy", "name": "a.json", "schema": {"enum": ["low", "high"]}}],
}
"""What benchmarks read in ../shared/data, in few rows."""

NAMES = {"smollm2", "smollm2-draft"}
"""What scripts load, and is a tiny model here."""


@cache
def _saved() -> str:
    folder = Path(tempfile.mkdtemp(prefix="tiny-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = make_model("llama", num_hidden_layers=30, hidden_size=32, max_position_embeddings=8192)
    return str(save(model, folder))


def smaller_model(load: Any) -> Any:
    """`load`, with a tiny model in place of the real ones, in int8 as they are."""

    def loaded(name: Any = "smollm2", *rest: Any, **settings: Any) -> Any:
        return load(_saved(), *rest, **{"dtype": "int8"} | settings) if name in NAMES else load(name, *rest, **settings)

    return loaded


def parsed(folder: Path, sizes: dict[str, Any]) -> Any:
    """In place of `parse_args`: options that nobody gave are small, and results go to `folder`."""
    parse = argparse.ArgumentParser.parse_args

    def smaller(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> argparse.Namespace:
        for action in parser._actions:
            if action.dest == "data":
                action.required, action.default = False, folder.parent / "data"
            elif action.dest in sizes and action.type in (int, float, None) and action.nargs != 0:
                action.default = sizes[action.dest]
            elif isinstance(action.default, Path) and FOLDER in (FOLDER.parent / action.default).parents:
                action.default = folder / action.default.name if action.default.suffix else folder
            elif action.required and action.option_strings and action.type in (Path, str, None):
                action.required = False
                action.default = (action.type or str)(folder / action.dest)
        return parse(parser, *arguments, **options)

    return smaller


def module(script: str) -> ModuleType:
    """A script, imported as a file and not as the main module."""
    name = "script_" + script.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / script)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def forget() -> None:
    """Forget the scripts' modules, whose names are those of others elsewhere. Their package stays."""
    # There are thousands of modules: the beginnings of texts are compared, not every folder of a path.
    for name, each in list(sys.modules.items()):
        script = not name.startswith("decodery_benchmarks")
        if script and (getattr(each, "__file__", None) or "").startswith(f"{FOLDER}{os.sep}"):
            del sys.modules[name]


def run(
    script: str,
    folder: Path,
    arguments: str = "",
    sizes: dict[str, Any] | None = None,
    *,
    real: bool = False,
    **constants: Any,
) -> None:
    """Run a script's main() on a tiny model, or on the real one. constants: of the script, in place of its own."""
    data = folder / "data"
    data.mkdir()
    for name, rows in DATA.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "results").mkdir()
    smaller = parsed(folder / "results", SIZES | (sizes or {}))
    path = [str((FOLDER / script).parent), str(FOLDER), *sys.path]
    with (
        mock.patch.dict(os.environ, {"DECODERY_DATA": str(data), "DECODERY_HOME": str(folder / "home")}),
        mock.patch.object(sys, "path", path),
        mock.patch.object(sys, "argv", [script, *arguments.format(folder=folder).split()]),
        mock.patch.object(decodery, "load", decodery.load if real else smaller_model(decodery.load)),
        mock.patch.object(loaders, "load", loaders.load if real else smaller_model(loaders.load)),
        mock.patch.object(argparse.ArgumentParser, "parse_args", smaller),
    ):
        forget()
        made = module(script)
        for name in ("OUT", "RESULT", "RESULTS", "DATA"):
            own = getattr(made, name, None)
            if name == "DATA" and own is not None:
                constants.setdefault(name, data)
            elif isinstance(own, Path):
                constants.setdefault(name, folder / "results" / own.name if own.suffix else folder / "results")
        for name, value in constants.items():
            assert hasattr(made, name), f"{script} has no {name}"
            setattr(made, name, value)
        try:
            made.main()
        finally:
            forget()


def apart(script: str, folder: Path, options: dict[str, Any]) -> str:
    """What a script prints that is run in a process of its own, for scripts change more than they put back."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_scripts"])
    process = context.Process(target=_run, args=(script, folder, options))
    # The process that all others are forked from imports what they need, once.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        process.start()
    process.join(300)
    output = (folder / "output.txt").read_text("utf-8")
    assert process.exitcode == 0, output[-5000:]
    return output


def _run(script: str, folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with (folder / "output.txt").open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            run(script, folder, **options)
        except BaseException:
            traceback.print_exc()
            file.flush()
            os._exit(1)
