"""Problems with answers or tests: read from a file, asked of a model, and checked."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from doctest import DocTestParser
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from decodery.core.errors import SettingsError
from decodery.scorers.program_tests import ProgramTests
from decodery.scorers.sandbox import Sandbox
from decodery.search.answers import AnswerExtractor, canonical

QUESTION = ("prompt", "question", "problem")
_MOST_BYTES = 1 << 28
_MOST_LINE = 1 << 20


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        name: What it goes by in the results.
        question: A text.
        answer: The right one, None for a program.
        tests: Statements that a right program passes; no search reads them.
        examples: Tests that searches may use as a scorer.
    """

    name: str
    question: str
    answer: str | None = None
    tests: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Tells it from another problem of its name."""
        parts = json.dumps([self.question, self.answer, self.tests, self.examples])
        return sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def scorer(self, sandbox: Sandbox) -> ProgramTests | None:
        """The examples as a scorer of programs; None without any."""
        return ProgramTests(tests=self.examples, head=self.question, sandbox=sandbox) if self.examples else None

    def right(self, text: str, answers: AnswerExtractor, sandbox: Sandbox) -> bool:
        """Whether a text has the answer, or is a program that passes the tests."""
        if self.tests:
            return ProgramTests(tests=self.tests, head=self.question, sandbox=sandbox).verdict(text).share == 1
        assert self.answer is not None
        bare = answers.pattern or answers.kind == "whole" or "####" in self.answer or "\\boxed" in self.answer
        found, wanted = answers.of([text, self.answer if bare else f"#### {self.answer}"])
        # A pattern is for what texts say, and the answer of a file may be bare.
        wanted = canonical(self.answer) if wanted is None else wanted
        return found is not None and found == wanted


def read_problems(path: str | Path) -> list[Problem]:
    """The problems of a file with an object a line.

    A line has `prompt`, `question` or `problem`, and `answer`, or `tests` (a list of Python statements), or HumanEval's
    `test` and `entry_point`. `examples` are tests that searches may use; by default those of a docstring.

    Raises:
        SettingsError: For a file that cannot be read, and a line that is no problem.
    """
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise SettingsError(f"{path} is larger than 256 MiB: give a smaller file of problems")
        # Texts may hold the other marks that end lines.
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read problems from {path}: {error}") from error
    found = [_problem(line, number, str(path)) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SettingsError(f"{path} holds no problem: write an object a line, with a question and its answer")
    if len({each.name for each in found}) < len(found):
        raise SettingsError(f"two problems of {path} have the same id: give each one of its own")
    return found


def _problem(line: str, number: int, path: str) -> Problem:
    try:
        entry = json.loads(line) if len(line) <= _MOST_LINE else None
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise SettingsError(f"line {number} of {path} is no JSON object of at most 1 MiB: write a problem a line")
    return problem_of(entry, number, path)


def problem_of(entry: dict[str, Any], number: int, path: str | Path) -> Problem:
    """The problem of one line of a file.

    Raises:
        SettingsError: For what is none.
    """
    question = next((entry[name] for name in QUESTION if isinstance(entry.get(name), str)), "")
    name = str(entry.get("id", entry.get("task_id", number)))
    if not question:
        raise SettingsError(f"line {number} of {path} has no question: give it as prompt, question or problem")
    if isinstance(entry.get("test"), str) and isinstance(entry.get("entry_point"), str):
        tests: tuple[str, ...] = (f"{entry['test']}\ncheck({entry['entry_point']})",)
    else:
        tests = _texts(entry, "tests", number, path)
    answer = entry.get("answer")
    if not tests and not isinstance(answer, str | int | float):
        raise SettingsError(f"line {number} of {path} has neither an answer nor tests: give one of the two")
    examples = _texts(entry, "examples", number, path) or (tuple(docstring_tests(question)) if tests else ())
    return Problem(name, question, None if tests else str(answer), tests, examples)


def _texts(entry: dict[str, Any], name: str, number: int, path: str | Path) -> tuple[str, ...]:
    given = entry.get(name, [])
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise SettingsError(f"{name} in line {number} of {path} is a list of Python statements, not {given!r:.60}")
    return tuple(given)


def docstring_tests(program: str) -> Sequence[str]:
    """The examples of a docstring that Python reads as values, as asserts."""
    try:
        examples = DocTestParser().get_examples(program)
    except ValueError:
        return []
    found = []
    for each in examples:
        try:
            ast.parse(each.source.strip(), mode="eval")
            ast.literal_eval(each.want.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        found.append(f"assert ({each.source.strip()}) == ({each.want.strip()})")
    return found
