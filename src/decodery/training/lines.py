"""Files a user gives to learn from that hold one thing a line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from decodery.core.errors import CorruptFile, PromptError, SettingsError

_MOST_BYTES = 1 << 28
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


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSON Lines file, each with its line's number from 1.

    Yields:
        The number and the value, None for a line that is not JSON.

    Raises:
        CorruptFile: For a file without lines.
    """
    lines = _lines(path)
    if not lines:
        raise CorruptFile(f"{path} is empty: give one JSON object a line")
    for number, line in lines:
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            yield number, None


def read_objects(path: Path, form: str, read: Callable[[dict[str, Any]], Item | None]) -> list[Item]:
    """What the objects of a JSON Lines file hold.

    Args:
        read: Reads an object; None where it has another form. "group" is the line where an object has none.

    Raises:
        CorruptFile: A line is something else.
        PromptError: As `read` does, with the line.
    """
    found = []
    for number, entry in read_json_lines(path):
        try:
            item = read({"group": f"line {number}", **entry}) if isinstance(entry, dict) else None
        except PromptError as error:
            raise PromptError(f"line {number} of {path}: {error}") from error
        if item is None:
            raise CorruptFile(f"line {number} of {path} is not {form}")
        found.append(item)
    return found


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


def _lines(path: Path) -> list[tuple[int, bytes]]:
    if path.stat().st_size > _MOST_BYTES:
        raise SettingsError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: give fewer lines")
    # Nothing but a line feed ends a line: texts in JSON may hold other separators.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line.rstrip(b"\r")) for number, line in enumerate(lines, start=1) if line.strip()]
