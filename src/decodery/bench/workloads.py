"""What is decoded: the built-in questions, and public sets read from a folder the user names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, SettingsError

from .searches.problems import QUESTION, Problem, problem_of

_MOST_BYTES = 1 << 28
_MOST_SCHEMA = 2000
TIERS = ("low", "mixed", "high")
"""Entropy tiers of the throughput split: code, reports, creative writing."""


@dataclass(frozen=True)
class Question:
    """One conversation: what the user says, turn by turn. The model's own answers stand between the turns.

    schema: the JSON schema, as text, that answers are held to; empty for free ones. before: messages that stand before
    the first turn, as (role, content). problem: tells whether the last answer is right, where that is known.
    """

    id: str
    workload: str
    category: str
    turns: tuple[str, ...]
    schema: str = ""
    before: tuple[tuple[str, str], ...] = ()
    problem: Problem | None = None


@dataclass(frozen=True)
class Workload:
    """A set of questions. read: rows of the set to questions; patterns: names its file may have, none if built in."""

    summary: str
    read: Callable[[list[dict[str, Any]], str], list[Question]]
    patterns: tuple[str, ...] = ()
    built_in: str = ""


def questions(name: str, data: Path | None = None, most: int | None = None) -> list[Question]:
    """The questions of a workload, or `most` of them, evenly spaced so that categories keep their shares.

    Raises SettingsError for an unknown name or a set that needs `data`, CorruptFile for a file that is not the set.
    """
    if name not in WORKLOADS:
        raise SettingsError(f"there is no workload {name!r}; choose among {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    if workload.built_in:
        rows = _built_in(workload.built_in)
        origin = workload.built_in
    else:
        path = find(name, data, workload.patterns)
        rows, origin = read_rows(path), path.name
    try:
        found = workload.read(rows, name)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{origin} is not the set {name}: a row lacks what it should have ({error})") from error
    if not found:
        raise CorruptFile(f"{origin} holds no question of the set {name}")
    return spaced(found, most)


OWN = "own"


def digest_of(path: Path) -> str:
    """What tells whether a file of prompts is still the same.

    Raises:
        SettingsError: For a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"cannot read the prompts in {path}: {error}") from error


def own_questions(path: Path, most: int | None = None) -> list[Question]:
    """The prompts of a user's file, or `most` of them, evenly spaced.

    A line is a JSON object with `prompt` (or `question`, `problem`), `turns` or `messages`, and if wanted `category`,
    `id` and `answer` or `tests`; in a file that is not named .jsonl it is a prompt itself.

    Raises:
        SettingsError: For a file that cannot be read, and a line that is no prompt.
    """
    if not path.is_file():
        raise SettingsError(f"there is no file {path}: give a .jsonl file of prompts, or a text file with one a line")
    if path.suffix != ".jsonl":
        texts = list(_lines(path))
        found = [Question(str(number), OWN, OWN, (text,)) for number, text in enumerate(texts, 1)]
    else:
        found = [_own(row, number, path) for number, row in enumerate(read_rows(path), 1)]
    if not found:
        raise SettingsError(f'{path} holds no prompt: write a JSON object a line, such as {{"prompt": "Hello."}}')
    if len({each.id for each in found}) < len(found):
        raise SettingsError(f"two prompts of {path} have the same id: give each one of its own, or none")
    return spaced(found, most)


_IDS = ("id", "question_id", "task_id")
_CHECKED = ("answer", "tests", "test", "entry_point", "examples")
_FIELDS = (*QUESTION, "turns", "messages", "category", *_IDS, *_CHECKED)


def _own(row: dict[str, Any], number: int, path: Path) -> Question:
    where = f"line {number} of {path}"
    if strange := [name for name in row if name not in _FIELDS]:
        raise SettingsError(
            f"{where} has the field {strange[0]!r}, which nothing reads; fields are {', '.join(_FIELDS)}"
        )
    given = [name for name in (*QUESTION, "turns", "messages") if name in row]
    if len(given) != 1:
        raise SettingsError(f"{where} has {' and '.join(given) or 'no prompt'}: give prompt, turns or messages")
    value: Any = row[given[0]]
    before: tuple[tuple[str, str], ...] = ()
    if given[0] == "messages":
        if not _is_chat(value):
            raise SettingsError(f"messages in {where} are objects with role and content, both texts, the user's last")
        before, value = tuple((each["role"], each["content"]) for each in value[:-1]), [value[-1]["content"]]
    turns = value if isinstance(value, list) else [value]
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise SettingsError(f"{given[0]} in {where} must be a text, not an empty one, or for turns a list of them")
    name = str(next((row[each] for each in _IDS if each in row), number))
    problem = None
    if any(each in row for each in _CHECKED):
        problem = problem_of(
            {"prompt": turns[-1]} | {each: row[each] for each in _CHECKED if each in row}, number, path
        )
    return Question(name, OWN, str(row.get("category", OWN)), tuple(turns), before=before, problem=problem)


def _is_chat(value: Any) -> bool:
    texts = isinstance(value, list) and all(
        isinstance(each, dict)
        and set(each) == {"role", "content"}
        and all(isinstance(text, str) for text in each.values())
        for each in value
    )
    return texts and bool(value) and value[-1]["role"] == "user"


def spaced(found: list[Question], most: int | None) -> list[Question]:
    """At most `most` of these, evenly spaced."""
    if most is None or most >= len(found):
        return found
    return [found[index * len(found) // most] for index in range(most)]


def find(name: str, data: Path | None, patterns: tuple[str, ...]) -> Path:
    """The first file under `data` that one of the patterns names."""
    wanted = " or ".join(patterns)
    if data is None:
        raise SettingsError(
            f"the workload {name} needs its data: give the folder that holds {wanted} with --data or DECODERY_DATA, or "
            "take the workload built-in"
        )
    if not data.is_dir():
        raise SettingsError(f"there is no folder {data}: give the one that holds {wanted} with --data")
    for pattern in patterns:
        if paths := sorted(data.glob(pattern)):
            return paths[0]
    raise SettingsError(
        f"the folder {data} holds no {wanted}, which the workload {name} needs: fetch it, or take the workload built-in"
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines or Parquet file."""
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.stat().st_size > _MOST_BYTES:
        raise CorruptFile(f"{path} is larger than any benchmark set ({_MOST_BYTES >> 20} MiB)")
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptFile(
                f"line {number} of {path} is not JSON: write one object a line, or fetch the file again"
            ) from error
        if not isinstance(row, dict):
            raise CorruptFile(f"line {number} of {path} is not a JSON object")
        rows.append(row)
    return rows


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from (line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFile(f"cannot read {path}: {error}") from error


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise SettingsError(f"reading {path} needs pyarrow: run `pip install pyarrow`, or save it as .jsonl") from error
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} is not a Parquet file: {error}") from error


def _built_in(name: str) -> list[dict[str, Any]]:
    return json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8"))


def documents() -> dict[str, str]:
    """A text of about 1,100 tokens per entropy tier, written for this project."""
    return json.loads((files(__package__) / "documents.json").read_text(encoding="utf-8"))


def _conversations(rows: list[dict[str, Any]], workload: str) -> list[Question]:
    """Spec-Bench's format, which SPEED-Bench and the built-in sets share; `document` goes before the first turn."""
    texts = documents() if any("document" in row for row in rows) else {}
    found = []
    for row in rows:
        turns = [str(turn) for turn in row["turns"]]
        if "document" in row:
            turns[0] = f"{texts[row['document']]}\n{turns[0]}"
        found.append(Question(str(row["question_id"]), workload, str(row["category"]), tuple(turns)))
    return found


def _speed(rows: list[dict[str, Any]], workload: str) -> list[Question]:
    refuse_placeholders(rows)
    return _conversations(rows, workload)


def refuse_placeholders(rows: list[dict[str, Any]]) -> None:
    """SPEED-Bench is published with placeholders where a source may not be redistributed; never measure on those."""
    for row in rows:
        for turn in row["turns"]:
            if "FULL BENCHMARK DATA SHOULD BE FETCHED" in turn.upper():
                raise SettingsError(
                    f"question {row['question_id']} of SPEED-Bench is a placeholder: complete the data with the "
                    "benchmark's own prepare_data.py first"
                )


def _code(rows: list[dict[str, Any]], workload: str) -> list[Question]:
    ask = "Complete this Python function. Give the whole function.\n\n```python\n{}```"
    return [Question(str(row["task_id"]), workload, "code", (ask.format(row["prompt"]),)) for row in rows]


def _math(rows: list[dict[str, Any]], workload: str) -> list[Question]:
    return [
        Question(str(number), workload, "math", (str(row["question"]),)) for number, row in enumerate(rows, start=1)
    ]


def _json(rows: list[dict[str, Any]], workload: str) -> list[Question]:
    ask = "Write one JSON object that is valid under this JSON schema, and nothing else.\n\n{}"
    found = []
    for row in rows:
        schema = json.dumps(row["schema"]) if isinstance(row["schema"], dict) else str(row["schema"])
        if len(schema) <= _MOST_SCHEMA:
            found.append(Question(str(row["name"]), workload, str(row["dataset"]), (ask.format(schema),)))
    return found


def _schemas(rows: list[dict[str, Any]], workload: str) -> list[Question]:
    ask = "Write one JSON object that is valid under this JSON schema, and nothing else.\n\n{}"
    found = []
    for row in rows:
        schema = row["schema"] if isinstance(row["schema"], str) else json.dumps(row["schema"])
        # The answer is held to all of the schema; the model reads as much of it as it may know what to do with.
        turn = ask.format(schema[:_MOST_SCHEMA])
        name = f"{row['dataset']}/{row['name']}"
        found.append(Question(name, workload, str(row["dataset"]), (turn,), schema))
    return found


WORKLOADS: dict[str, Workload] = {
    "built-in": Workload("35 questions of 15 kinds written for this project", _conversations, built_in="builtin"),
    "copy": Workload("texts to repeat, correct, convert and edit, built in", _conversations, built_in="copy"),
    "spec-bench": Workload(
        "Spec-Bench: 13 kinds of questions", _conversations, ("spec_bench*.jsonl", "question*.jsonl")
    ),
    "speed": Workload(
        "SPEED-Bench: 11 kinds of questions chosen to differ",
        _speed,
        ("speed/qualitative*.jsonl", "speed/qualitative/*.parquet", "qualitative*.jsonl", "qualitative/*.parquet"),
    ),
    "code": Workload("HumanEval: functions to complete", _code, ("humaneval*.jsonl", "HumanEval*.jsonl")),
    "math": Workload("GSM8K: school problems in words", _math, ("gsm8k*.jsonl",)),
    "jsonschema": Workload("JSONSchemaBench: answers held to their schema", _schemas, ("jsonschemabench*.jsonl",)),
    "json": Workload(
        f"JSONSchemaBench: schemas of at most {_MOST_SCHEMA} characters to fill", _json, ("jsonschemabench*.jsonl",)
    ),
}
