"""Files a user gives to learn from that hold one thing a line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, PromptError, SettingsError

_MOST_BYTES = 1 << 28


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file that hold something."""
    try:
        return [line.decode("utf-8") for _, line in _lines(path)]
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text ({error.reason}): convert it first") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSON Lines file, each with its line's number from 1.

    None for a line that is not JSON.

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


def read_labelled(path: Path, text: str, label: str) -> Iterator[tuple[str, bool, str]]:
    """Texts with their labels and groups of a JSON Lines file; a line without a group is one of its own.

    Args:
        path: The file.
        text: The name of the text in an entry.
        label: The name of its label, true or false.

    Raises:
        CorruptFile: A line is something else.
    """
    for number, entry in read_json_lines(path):
        known = entry if isinstance(entry, dict) else {}
        found, labelled, group = known.get(text), known.get(label), known.get("group", f"line {number}")
        if not isinstance(found, str) or not found or not isinstance(labelled, bool) or not isinstance(group, str):
            raise CorruptFile(
                f'line {number} of {path} is not {{"{text}": text, "{label}": true or false, "group": text}}'
            )
        yield found, labelled, group


def _lines(path: Path) -> list[tuple[int, bytes]]:
    if path.stat().st_size > _MOST_BYTES:
        raise SettingsError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: give fewer lines")
    # Nothing but a line feed ends a line: texts in JSON may hold other separators.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line.rstrip(b"\r")) for number, line in enumerate(lines, start=1) if line.strip()]
