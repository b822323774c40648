"""Files a user gives to learn from that hold one thing a line."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from decodery.core.errors import CorruptFile, PromptError, SettingsError

MOST_BYTES = 1 << 28
"""Of a file that is held as a whole."""
Item = TypeVar("Item")


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not empty.

    Raises:
        PromptError: It is not UTF-8.
        SettingsError: It is larger than can be read at once.
    """
    try:
        return [line.decode("utf-8") for _, line in _lines(path)]
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text ({error.reason}): convert it first") from error


def read_json_lines(path: Path, most: float = MOST_BYTES) -> Iterator[tuple[int, Any]]:
    """The values of a JSON Lines file, each with its line's number from 1.

    Args:
        most: Bytes that it may have.

    Yields:
        The number and the value, None for a line that is not JSON.

    Raises:
        CorruptFile: For a file without lines.
    """
    number = 0
    for number, line in _lines(path, most):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            yield number, None
    if not number:
        raise CorruptFile(f"{path} is empty: give one JSON object a line")


def read_objects(path: Path, form: str, read: Callable[[dict[str, Any]], Item | None]) -> list[Item]:
    """What the objects of a JSON Lines file hold, see `each_object`."""
    return list(each_object(path, form, read, MOST_BYTES))


def each_object(
    path: Path, form: str, read: Callable[[dict[str, Any]], Item | None], most: float = math.inf
) -> Iterator[Item]:
    """What the objects of a JSON Lines file hold, one after another.

    Args:
        read: Reads an object; None where it has another form. "group" is the line where an object has none.
        most: Bytes that the file may have.

    Raises:
        CorruptFile: A line is something else.
        PromptError: As `read` does, with the line.
    """
    for number, entry in read_json_lines(path, most):
        try:
            item = read({"group": f"line {number}", **entry}) if isinstance(entry, dict) else None
        except PromptError as error:
            raise PromptError(f"line {number} of {path}: {error}") from error
        if item is None:
            raise CorruptFile(f"line {number} of {path} is not {form}")
        yield item


def read_texts(path: Path, *names: str) -> list[tuple[str, ...]]:
    """The texts under these names in each line of a JSON Lines file, see `read_objects`."""
    form = ", ".join(f'"{name}": text' for name in names)
    return read_objects(path, f"{{{form}}}", lambda each: named_texts(each, *names))


def named_texts(entry: dict[str, Any], *names: str) -> tuple[str, ...] | None:
    """The texts of an object under these names; None where one is missing or empty."""
    found = [text for name in names if isinstance(text := entry.get(name), str) and text]
    return tuple(found) if len(found) == len(names) else None


def read_labelled(path: Path, text: str, label: str) -> list[tuple[str, bool, str]]:
    """Texts with their labels and groups of a JSON Lines file; a line without a group is one of its own."""

    def read(entry: dict[str, Any]) -> tuple[str, bool, str] | None:
        labelled, group = entry.get(label), entry["group"]
        if named_texts(entry, text) is None or not isinstance(labelled, bool) or not isinstance(group, str):
            return None
        return entry[text], labelled, group

    return read_objects(path, f'{{"{text}": text, "{label}": true or false, "group": text}}', read)


def _lines(path: Path, most: float = MOST_BYTES) -> Iterator[tuple[int, bytes]]:
    if path.stat().st_size > most:
        raise SettingsError(f"{path} is larger than {MOST_BYTES >> 20} MiB: give fewer lines")
    with path.open("rb") as file:
        # Nothing but a line feed ends a line: texts in JSON may hold other separators.
        for number, line in enumerate(file, start=1):
            text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
            if text.strip():
                yield number, text
