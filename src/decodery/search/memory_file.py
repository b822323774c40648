"""What a stream of questions leaves on disk for those that come after: never half written, and nothing of it lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from decodery.core.errors import CorruptFile
from decodery.models.loaders.store import locked, unwritable, write_text

FORMAT = "decodery cheatsheet 1"
MOST_ENTRIES, MOST_ENTRY = 1000, 4000
"""Questions that are kept with their answers, the oldest go first; characters of each of the two."""
_MOST_BYTES = 1 << 26
EMPTY = "(empty)"


@dataclass(frozen=True)
class Sheet:
    """A memory as its file holds it.

    Attributes:
        version: How often it was written.
        memory: What the model noted.
        entries: Questions and what was answered.
    """

    version: int = 0
    memory: str = EMPTY
    entries: tuple[tuple[str, str], ...] = ()

    def after(self, question: str, answer: str, memory: str | None = None) -> Sheet:
        """With one entry more, and another memory where one is given."""
        entry = question[:MOST_ENTRY], answer[:MOST_ENTRY]
        entries = (*self.entries, entry)[-MOST_ENTRIES:]
        return Sheet(self.version + 1, self.memory if memory is None else memory, entries)


class SheetFile:
    """A sheet on disk, which several processes may use at a time."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()

    def read(self) -> Sheet:
        """What it holds, a new sheet where there is no file.

        Raises:
            CorruptFile: For anything but a sheet.
        """
        wrong = f"{self.path} is no cheatsheet, or is damaged: name another file, or remove it to start again"
        try:
            if self.path.stat().st_size > _MOST_BYTES:
                raise CorruptFile(wrong)
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Sheet()
        except OSError as error:
            raise CorruptFile(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise CorruptFile(wrong) from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CorruptFile(wrong)
        version, memory, entries = found.get("version"), found.get("memory"), found.get("entries")
        if not isinstance(version, int) or not isinstance(memory, str) or not isinstance(entries, list):
            raise CorruptFile(wrong)
        if any(
            not isinstance(each, list) or len(each) != 2 or not all(isinstance(t, str) for t in each)
            for each in entries
        ):
            raise CorruptFile(wrong)
        return Sheet(version, memory, tuple((question, answer) for question, answer in entries))

    def change(self, how: Callable[[Sheet], Sheet | None]) -> Sheet:
        """Replace the sheet by what `how` makes of it, unless that is None; no other writer comes between.

        Returns:
            The sheet that `how` was given.

        Raises:
            DecoderyError: If the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path.parent, error) from error
        with locked(self.path.with_name(f"{self.path.name}.lock")):
            before = self.read()
            if (after := how(before)) is not None:
                plain = {"version": after.version, "memory": after.memory, "entries": after.entries}
                write_text(self.path, json.dumps({"format": FORMAT, **plain}, ensure_ascii=False, indent=1))
            return before


def unless_changed(seen: Sheet, after: Sheet) -> Callable[[Sheet], Sheet | None]:
    """`after`, where the sheet is still the one that was seen."""
    return lambda sheet: replace(after) if sheet.version == seen.version else None
