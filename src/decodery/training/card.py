"""The model card beside what was trained, which tells whose folder it is."""

from __future__ import annotations

from pathlib import Path

from decodery.core.errors import SettingsError

CARD = "README.md"


def refuse_others(out: Path, *, made: str, what: str) -> None:
    """Raise SettingsError where training would overwrite something else.

    A card that is not beside the file `made`.

    Args:
        what: What that says of the folder, for the sentence.
    """
    if (out / CARD).exists() and not (out / made).exists():
        raise SettingsError(f"{out} has a {CARD} and {what}: name a new folder")
