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


def _lines(path: Path) -> list[tuple[int, bytes]]:
    if path.stat().st_size > _MOST_BYTES:
        raise SettingsError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: give fewer lines")
    # Nothing but a line feed ends a line: texts in JSON may hold other separators.
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line.rstrip(b"\r")) for number, line in enumerate(lines, start=1) if line.strip()]
