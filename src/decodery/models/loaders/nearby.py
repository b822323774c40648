"""What lies near a model on this machine: in its own folder, beside it, and in the Hub's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from decodery.core.errors import DecoderyError

from . import hub
from . import package_index as embedded
from .gguf_file import parts_of

_MOST = 64
"""Entries that are looked at beside a model, and in the Hub's cache."""
_HUB_FOLDERS = "models--*/snapshots/*"
_SIGHT = "mmproj"


@dataclass(frozen=True)
class Nearby:
    """A folder or a GGUF file near a model.

    Attributes:
        path: Where it is; of a file of several parts the first one.
        inside: Whether it stands in the model's own folder.
    """

    path: Path
    inside: bool = False


def own_place(origin: str) -> Path | None:
    """The folder or GGUF file that a model was loaded from, None where it is not here.

    Args:
        origin: What it was loaded as, see `origins`.
    """
    if not origin:
        return None
    if origin in embedded.EMBEDDED:
        return embedded.gguf_path(origin)
    if (path := Path(origin).expanduser()).exists():
        return path
    repository, _, quant = origin.partition(":")
    if not hub.is_hub_id(repository):
        return None
    snapshots = hub_cache() / f"models--{repository.replace('/', '--')}" / "snapshots"
    folders = _found(snapshots, "*", Path.is_dir)
    if not quant or not folders:
        # Of several states of a repository, which one was loaded is not known.
        return folders[0] if len(folders) == 1 else None
    ending = re.compile(rf"(?:.*[-._])?{re.escape(quant)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    return next((each for folder in folders for each in _files(folder, "*.gguf") if ending.fullmatch(each.name)), None)


def nearby(own: Path | None, signs: Sequence[str]) -> Iterator[Nearby]:
    """The folders and GGUF files near a model, the nearest first, each once and never the model's own.

    Args:
        own: The model's folder or file, see `own_place`.
        signs: Names of files of which a folder of the kind has at least one.
    """

    def signed(folder: Path) -> bool:
        return any((folder / sign).is_file() for sign in signs)

    seen = {os.path.realpath(own)} if own is not None else set[str]()
    for each in _near(own):
        inside, parent, folders, files = each
        for path in (*_found(parent, folders, signed), *(path for name in files for path in _files(parent, name))):
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield Nearby(path, inside)


def hub_cache() -> Path:
    """The folder in which the Hub's library keeps repositories."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path()
    return Path(HF_HUB_CACHE)


def _near(own: Path | None) -> Iterator[tuple[bool, Path, str, Sequence[str]]]:
    """Where to look: whether it is the model's folder, a folder, and patterns of folders and of files in it."""
    if own is not None:
        folder = own if own.is_dir() else own.parent
        yield True, folder, "*", ("*.gguf",)
        yield False, folder.parent, "*", ("*.gguf", "*/*.gguf")
    if (cache := hub_cache()) != Path():
        yield False, cache, _HUB_FOLDERS, (f"{_HUB_FOLDERS}/*.gguf",)


def _files(parent: Path, pattern: str) -> list[Path]:
    """GGUF files that hold a model or a head, or begin one."""

    def first(path: Path) -> bool:
        try:
            return _SIGHT not in path.name.lower() and path.is_file() and bool(parts_of(path))
        except DecoderyError:
            return False

    return _found(parent, pattern, first)


def _found(parent: Path, pattern: str, fits: Callable[[Path], bool]) -> list[Path]:
    """Of what fits a pattern in a folder the first in order, of at most so many."""
    try:
        return sorted(islice((each for each in parent.glob(pattern) if fits(each)), _MOST))
    except OSError:
        return []
