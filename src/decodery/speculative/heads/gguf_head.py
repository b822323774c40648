"""Draft heads in GGUF files of llama.cpp, by their architecture."""

from __future__ import annotations

from pathlib import Path

from decodery.core.errors import UnsupportedModel
from decodery.models.loaders.gguf_file import GGUFFile
from decodery.models.trained.artifact import remembered

from .gguf_dflash import gguf_dflash
from .gguf_eagle3 import gguf_eagle_3
from .head import TrainedHead

_READERS = {"eagle3": gguf_eagle_3, "dflash": gguf_dflash}
_BEGINNING = 256
"""Bytes within which converters name the architecture, which is the first key that they write."""


@remembered
def gguf_head(path: Path) -> TrainedHead:
    """The head of a GGUF file.

    Raises:
        UnsupportedModel: For a file of another architecture, and for what is not run here, by its name.
        CorruptFile: If something is missing.
    """
    file = GGUFFile.whole(path)
    try:
        architecture = file.metadata.get("general.architecture")
        if architecture not in _READERS:
            raise UnsupportedModel(
                f"{path}: a GGUF file of a draft head is of the architecture {' or '.join(_READERS)}, and this one is "
                f"of {architecture!r}: name a head, or use this file as a model"
            )
        return _READERS[architecture](file, path)
    finally:
        file.close()


def names_head(path: Path) -> bool:
    """Whether a GGUF file is one of a draft head, by its first bytes: whole models take long to read."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    return any(len(name).to_bytes(8, "little") + name.encode() in beginning for name in _READERS)


def gguf_targets(path: Path) -> list[str]:
    """The models that a GGUF file of a head names as those it was made for, by their Hub ids or names.

    Raises:
        CorruptFile: For what is no GGUF file.
    """
    file = GGUFFile(path)
    try:
        told = file.metadata
        count = told.get("general.base_model.count", 0)
        prefixes = [
            f"general.base_model.{number}." for number in range(min(count, 16) if isinstance(count, int) else 0)
        ]
        found = [told.get(f"{each}repo_url") or told.get(f"{each}name") for each in prefixes]
        return [name.replace(" ", "-") for name in found if isinstance(name, str)]
    finally:
        file.close()
