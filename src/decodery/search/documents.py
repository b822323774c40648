"""What searches over documents read from files: documents and worked examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from decodery.core.errors import SettingsError
from decodery.models.trained.artifact import remembered

from .retrieval import Keywords

_MOST_BYTES = 1 << 28
_PARAGRAPH = "\n\n"


@dataclass(frozen=True)
class Demonstration:
    """A question with its answer.

    Attributes:
        steps: follow-up questions and what was answered to each, on the way there.
    """

    question: str
    answer: str
    steps: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Documents:
    """Documents that are at hand."""

    texts: tuple[str, ...]


class Library:
    """Documents, each cut to `most` words, and how they are found."""

    def __init__(self, documents: Sequence[str], most: int) -> None:
        self.documents = [" ".join(each.split()[:most]) for each in documents]
        self._keywords = Keywords(self.documents)

    def best(self, question: str, k: int) -> list[str]:
        """The k documents that fit best, the best last, so that it is nearest to the question."""
        return [self.documents[number] for number in reversed(self._keywords.best(question, k))]


def library(documents: str | Documents, most: int) -> Library:
    """A library of documents, or of those in a file.

    Raises:
        SettingsError: For a file that holds none.
    """
    if isinstance(documents, str):
        return _read_library(documents, most)
    return _library(documents, most)


@lru_cache(maxsize=8)
def _library(documents: Documents, most: int) -> Library:
    return Library(documents.texts, most)


@remembered
def _read_library(path: Path, most: int) -> Library:
    text = _text(path)
    if path.suffix == ".jsonl":
        found = [str(line["text"]) for line in _lines(path, text, ("text",))]
    else:
        found = [part.strip() for part in text.split(_PARAGRAPH) if part.strip()]
    if not found:
        raise SettingsError(
            f'{path} holds no documents: write paragraphs, or lines like {{"text": ...}} in a .jsonl file'
        )
    return Library(found, most)


def demonstrations(given: str | tuple[Demonstration, ...]) -> tuple[Demonstration, ...]:
    """Worked examples, or those of a .jsonl file."""
    return _read_demonstrations(given) if isinstance(given, str) and given else tuple(given)  # type: ignore[arg-type]


@remembered
def _read_demonstrations(path: Path) -> tuple[Demonstration, ...]:
    found = []
    for line in _lines(path, _text(path), ("question", "answer")):
        steps = line.get("steps", [])
        if not isinstance(steps, list) or any(not isinstance(each, list) or len(each) != 2 for each in steps):
            raise SettingsError(f"{path}: steps is a list of pairs: a follow-up question and its answer")
        pairs = tuple((str(question), str(answer)) for question, answer in steps)
        found.append(Demonstration(str(line["question"]), str(line["answer"]), pairs))
    return tuple(found)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SettingsError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: give a smaller file")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error


def _lines(path: Path, text: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each with these keys."""
    found = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or any(key not in value for key in keys):
            raise SettingsError(f"line {number} of {path} is no JSON object with {' and '.join(keys)}")
        found.append(value)
    return found
