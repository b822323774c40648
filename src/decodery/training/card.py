"""The model card beside what was trained, which tells whose folder it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decodery.core.errors import SettingsError
from decodery.models.loaders.store import write_text

CARD = "README.md"


def check_of(made: str, what: str) -> Callable[[Path], None]:
    """A check of folders: it raises SettingsError where training would overwrite something else.

    Args:
        made: The file that stands beside the card of what is trained.
        what: What a card without that file says of the folder, such as "is no draft".
    """

    def check(out: Path) -> None:
        if (out / CARD).exists() and not (out / made).exists():
            raise SettingsError(f"{out} has a {CARD} and {what}: name a new folder")

    return check


def write_card(out: Path, text: str) -> None:
    """Write the card last: without what was made beside it, the folder would be taken for another one's."""
    write_text(out / CARD, text)


def command_lines(command: str) -> str:
    """The command that made something, as a card shows it; nothing where it is not known."""
    return f"\n    {command}\n" if command else ""
