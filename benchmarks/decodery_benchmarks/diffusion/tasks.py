"""ParallelBench's operations on lists: of names, as published, or of letters, drawn at any size; and its puzzles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodery.bench.workloads import read_rows
from decodery.core.errors import CorruptFile, SettingsError
from decodery.engine.output import Output
from decodery.llm.llm import LLM
from decodery.training.lists import LISTS, VOCABULARY, canvas_length

FOLDER = "parallelbench"
SEVERAL = frozenset({
    "shuffle", "insert-random", "remove-random", "replace-random", "latin-square", "shuffle-names",
    "replace-random-names", "pair", "seed-copy",
})  # fmt: skip
"""Tasks with more than one right answer."""
_SAID = {
    "copy": "Write the list as it is.",
    "reverse": "Write the list in reverse order.",
    "sort": "Write the list in alphabetical order.",
    "shuffle": "Write the list in another, random order.",
    "insert-index": 'Write the list with "{word}" inserted so that it stands at index {index}, counted from 0.',
    "insert-random": 'Write the list with "{word}" inserted at a random place.',
    "remove-index": "Write the list without the element at index {index}, counted from 0.",
    "remove-random": "Write the list without one element, any of them.",
    "replace-index": 'Write the list with "{word}" in place of the element at index {index}, counted from 0.',
    "replace-random": 'Write the list with "{word}" in place of one element, any of them.',
}
"""The instructions are ours; the published ones are part of the benchmark's code and not of its data."""


@dataclass(frozen=True)
class Item:
    """A prompt, a text or chat messages, and what scores an output from 0 to 1."""

    task: str
    prompt: Any
    apply_chat_template: bool
    right: Callable[[Output], float]


def drawn(tasks: Sequence[str], count: int, letters: int, seed: int) -> list[Item]:
    """`count` prompts of each task for a model of `decodery train diffusion`, none of which it was trained on."""
    from decodery.training.diffusion import DiffusionRecipe, held_out

    def right(example: Any) -> Callable[[Output], bool]:
        return lambda output: example.right(
            [VOCABULARY[token] for token in output.tokens if token != output.stopped_by]
        )

    asked = held_out(DiffusionRecipe(tuple(tasks), letters, seed=seed), count * len(tasks))
    return [Item(each.task, " ".join(each.prompt), False, right(each)) for each in asked]


def knows_letters(lm: LLM) -> bool:
    """Whether a model's tokens are those of lists of letters."""
    tokenizer = lm.tokenizer
    return tokenizer.encode(" ".join(VOCABULARY)) == list(range(len(VOCABULARY)))


def room(lm: LLM, tasks: Sequence[str], letters: int) -> int:
    """Tokens of a canvas, where nothing else is asked for; the published 32 for lists of names, 64 for other files."""
    if knows_letters(lm):
        return canvas_length(tasks, letters)
    lines = [task for task in tasks if "/" not in task or task.startswith("waiting_line/")]
    if any(task.startswith("waiting_line_n15/") for task in tasks):
        return 128
    return 32 if len(lines) == len(tasks) else 64


def published(tasks: Sequence[str], count: int, data: Path | None) -> list[Item]:
    """At most `count` prompts of each task about lists of names, each with an example, from a folder of public sets.

    Raises SettingsError where there is no such folder, CorruptFile where it holds something else.
    """
    folder = None if data is None else data / FOLDER
    if folder is None or not folder.is_dir():
        raise SettingsError(
            "parallelbench uses lists of names for this model: give the folder that holds parallelbench/ with --data"
        )
    if others := [task for task in tasks if task not in LISTS]:
        raise SettingsError(
            f"the published prompts have no task {others[0]!r}, only models of `decodery train diffusion` are asked "
            f"about it; theirs are {', '.join(LISTS)}"
        )
    found = []
    for task in tasks:
        path = folder / f"waiting_line__{task.replace('-', '_')}.jsonl"
        try:
            found += [_named(task, row) for row in read_rows(path)[:count]]
        except (KeyError, TypeError, IndexError, FileNotFoundError) as error:
            raise CorruptFile(f"{path} is not a task of ParallelBench ({error})") from error
    return found


def _named(task: str, row: dict[str, Any]) -> Item:
    example, asked = row["input"]["icl_examples"][0], row["input"]
    answer = example["answer"]
    shown = answer if isinstance(answer, str) else answer["example"]
    prompt = (
        f"{_said(task, example['input'])}\n{example['input']['context']}\nAnswer: {shown}\n\n"
        f"{_said(task, asked)}\n{asked['context']}\nAnswer with the list alone."
    )
    items, word, index = names(asked["context"]), asked.get("word"), asked.get("index")
    if items is None:
        raise KeyError("context")
    return Item(task, prompt, True, lambda output: right(task, items, word, index, output.text))


def _said(task: str, asked: dict[str, Any]) -> str:
    return _SAID[task].format(word=asked.get("word"), index=asked.get("index"))


def names(text: str) -> list[str] | None:
    """The items of the last list in a text, without quotes and blanks; None where there is none."""
    found = re.findall(r"\[([^\[\]]*)\]", text)
    return [each.strip().strip("\"'").strip() for each in found[-1].split(",")] if found else None


def right(task: str, items: list[str], word: str | None, index: int | None, text: str) -> bool:
    """Whether a text ends with a right answer about a list. word: what comes in; index: where, or what is meant."""
    found = names(text)
    if found is None:
        return False
    # The rules of lists of letters, in which what comes in is one word and a place stands before the list.
    known = {word: "+"} if word is not None else {}
    posed = items if index is None else [str(index), *items]
    return LISTS[task].right(posed, [known.get(each, each) for each in found])
