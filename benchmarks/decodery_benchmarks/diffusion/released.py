"""ParallelBench as released: its files by their names, its prompts from its `task_config.yaml`, its scores.

A folder holds `GROUP/TASK.jsonl` and `GROUP/task_config.yaml`, as `dataset/parallel_bench/data/output/test` of
furiosa-ai/ParallelBench does; `waiting_line_n15/copy` or `puzzle/latin_square_n4` names a task. Examples are earlier
turns of the conversation, as in its own evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decodery.bench.workloads import read_rows
from decodery.core.errors import CorruptFile, SettingsError

from .released_scores import JUDGED, Judge, Score, score_of
from .tasks import FOLDER, Item

_CONFIG = "task_config.yaml"
_MOST_BYTES = 1 << 20


def is_released(task: str) -> bool:
    """Whether a task's name is that of a published file."""
    return "/" in task


def released(tasks: Sequence[str], count: int, data: Path | None, judge: Judge | None) -> list[Item]:
    """At most `count` prompts of each task.

    Args:
        tasks: Names of published files, `GROUP/TASK`.
        data: The folder that holds `parallelbench/`.
        judge: What tells whether sentences are right; None refuses the tasks that need one.

    Raises:
        SettingsError: For a folder or a task that is not there, or a task that needs a judge.
        CorruptFile: For files that are not as published.
    """
    folder = None if data is None else data / FOLDER
    if folder is None or not folder.is_dir():
        raise SettingsError(f"{tasks[0]} is read from a folder that holds {FOLDER}/: give it with --data")
    found = []
    for task in tasks:
        path = folder / f"{task}.jsonl"
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            there = sorted(str(each.relative_to(folder))[: -len(".jsonl")] for each in folder.glob("*/*.jsonl"))
            raise SettingsError(f"{folder} has no task {task!r}; it has {', '.join(there) or 'none as published'}")
        prompt, metric = _config(path.parent / _CONFIG, task)
        if metric in JUDGED and judge is None:
            raise SettingsError(f"{task} is scored by a judge: name a chat model with --judge, or leave the task out")
        try:
            found += [_item(task, row, prompt, score_of(metric, judge)) for row in read_rows(path)[:count]]
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise CorruptFile(f"{path} is not a task of ParallelBench ({error!r})") from error
    return found


def _config(path: Path, task: str) -> tuple[str, str]:
    """The prompt and the metric of a task."""
    import yaml

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CorruptFile(f"{path} is larger than any configuration of ParallelBench ({_MOST_BYTES >> 20} MiB)")
        config = yaml.safe_load(path.read_text(encoding="utf-8"))[task]
        prompt, metric = config["prompt"], config["metric"]
    except (OSError, yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} has no prompt and metric for {task}: fetch it with the task's file") from error
    if not isinstance(prompt, str) or not isinstance(metric, str):
        raise CorruptFile(f"the prompt and the metric of {task} in {path} must be texts")
    return prompt, metric


def _item(task: str, row: dict[str, Any], prompt: str, score: Score) -> Item:
    asked, answer = row["input"], row["answer"]
    turns = []
    for example in asked.get("icl_examples", ()):
        shown = example["answer"]
        turns += [
            {"role": "user", "content": _filled(prompt, example["input"])},
            {"role": "assistant", "content": shown if isinstance(shown, str) else shown["example"]},
        ]
    turns.append({"role": "user", "content": _filled(prompt, asked)})
    return Item(task, turns, True, lambda output: score(output.text, answer))


def _filled(prompt: str, asked: dict[str, Any]) -> str:
    """A prompt with the values of one question in place of their names.

    Plain replacement: a format string of a file could reach into objects.
    """
    for name, value in asked.items():
        if not isinstance(value, list | dict):
            prompt = prompt.replace("{" + name + "}", str(value))
    return prompt.replace("\\n", "\n")
