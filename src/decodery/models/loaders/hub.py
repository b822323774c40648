"""Models and datasets from the Hugging Face Hub, through `huggingface_hub`."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, DecoderyError, ModelNotFound

from .fields import shard_names
from .gguf_file import parts_of
from .store import is_full, system_error

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_STARTS = ("", "*[-._/]")
"""What stands before a quantization in the name of a file."""
_SIGHT = "mmproj"
"""What names of files have that hold the vision tower beside a language model."""
# No pickles, no code; "consolidated" files repeat the weights in another layout.
_FILES = ["*.json", "*.jinja", "model*.safetensors", "merges.txt"]
# Of a dataset, text that is about it.
_NOTES = re.compile(r"(?:licen[cs]e|readme|requirements|notice|copying|changelog)(?:[-_.].*)?", re.IGNORECASE)


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like owner/model."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(name: str, revision: str | None = None, *, refresh: bool = False) -> Path:
    """The local folder of a Hub model.

    Fetched where it is not there yet, brought up to date with `refresh`.
    """
    folder = fetched(name, _FILES, _is_complete, revision, refresh=refresh)
    if not _is_complete(folder):
        # Without a network the library answers with whatever it has.
        at = f"{name} at {revision}" if revision else name
        raise ModelNotFound(
            f"{at} has no complete safetensors weights here or on the Hub: check the network and the model, or give "
            f"one of its GGUF files by its quantization, as in {name}:Q4_K_M"
        )
    return folder


def gguf_file(name: str, quant: str, revision: str | None = None, *, refresh: bool = False) -> Path:
    """The first GGUF file of a quantization in a Hub repository; missing parts are fetched.

    Args:
        name: The repository, owner/name.
        quant: The quantization as files are named, such as Q4_K_M; case does not matter.
        revision: Of the repository.
        refresh: Whether what is here already is brought up to date.

    Raises:
        ModelNotFound: There is no such repository, or no such file in it, with what there is.
    """
    # Patterns of file names know cases, and files are named in both.
    names = [f"{start}{each}" for each in dict.fromkeys((quant, quant.upper(), quant.lower())) for start in _STARTS]
    wanted = [f"{each}{end}" for each in names for end in (".gguf", "-?????-of-?????.gguf")]
    first = re.compile(rf"(?:.*[-._])?{re.escape(quant)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)

    def found(folder: Path) -> list[Path]:
        files = (path for path in folder.rglob("*.gguf") if _SIGHT not in path.name.lower())
        return sorted(path for path in files if first.fullmatch(path.name))

    def complete(folder: Path) -> bool:
        try:
            return len([parts_of(path) for path in found(folder)]) > 0
        except CorruptFile:
            return False

    files = found(fetched(name, wanted, complete, revision, refresh=refresh))
    if len(files) != 1:
        shown = ", ".join(path.name for path in files) or "none of its GGUF files"
        raise ModelNotFound(
            f"{name}: {shown} {'are all' if files else 'is'} of the quantization {quant}: see the names of the files "
            "on the Hub, and give the part that says it, such as :Q4_K_M"
        )
    return files[0]


def dataset(name: str) -> list[Path]:
    """The `.jsonl` files of a Hub dataset, or its `.txt` files where it has none.

    Licences and the like are left out. What is here already is brought up to date.

    Raises:
        ModelNotFound: There is no such dataset, or it has none of both.
    """
    folder = fetched(name, ["*.jsonl", "*.txt"], lambda folder: False, refresh=True, kind="dataset")
    found = sorted(folder.rglob("*.jsonl")) or [
        path for path in sorted(folder.rglob("*.txt")) if not _NOTES.fullmatch(path.stem)
    ]
    if not found:
        raise ModelNotFound(f"the dataset {name} has no .jsonl and no .txt files here or on the Hub: name one that has")
    return found


def fetched(
    name: str,
    files: list[str],
    complete: Callable[[Path], bool],
    revision: str | None = None,
    *,
    refresh: bool = False,
    kind: str = "model",
) -> Path:
    """The local folder with those of a Hub repository's `files` that it has, names or patterns.

    It is fetched where what is here is not `complete`, or with `refresh`; without a network it may still not be.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    wanted: dict[str, Any] = {
        "repo_type": kind,
        "revision": revision,
        "allow_patterns": files,
        "ignore_patterns": f"*{_SIGHT}*",
    }
    if not refresh:
        try:
            folder = Path(snapshot_download(name, **wanted, local_files_only=True))
            if complete(folder):
                return folder
        except LocalEntryNotFoundError:
            pass
    at = f"{name} at {revision}" if revision else name
    try:
        return Path(snapshot_download(name, **wanted))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"the Hub requires permission to use {at}: request it there and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the Hub has no {kind} {at}, or it is private: check the name or run `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        if (unwritten := _storage_error(error)) is not None:
            raise DecoderyError(
                f"cannot keep {at} in {HF_HUB_CACHE} ({unwritten.strerror}): free some space or set HF_HOME to a "
                "folder that you may write to"
            ) from error
        raise ModelNotFound(
            f"cannot fetch {at} from the Hub ({type(error).__name__}): check the network, or copy the {kind}'s "
            "folder here and give its path"
        ) from error


def _storage_error(error: Exception) -> OSError | None:
    """What keeps the files from being written: no room, or no permission; None where it is something else."""
    found = error if isinstance(error, OSError) else system_error(str(error))
    if found is None:
        return None
    # A connection that is refused has no file.
    refused = isinstance(found, PermissionError | NotADirectoryError) or found.errno == errno.EROFS
    return found if is_full(found) or (refused and found.filename is not None) else None


def _is_complete(folder: Path) -> bool:
    """Whether an earlier fetch brought all weights: one file, or every shard that the index names."""
    if (folder / "model.safetensors").exists():
        return (folder / "config.json").exists()
    try:
        return all((folder / shard).exists() for shard in set(shard_names(folder).values()))
    except CorruptFile:
        return False
