"""Models from the Hugging Face Hub, through `huggingface_hub`."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import CorruptFile, DecoderyError, ModelNotFound
from .fields import shard_names
from .store import is_full, system_error

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# No pickles, no code; "consolidated" files repeat the weights in another layout.
_FILES = ["*.json", "*.jinja", "model*.safetensors", "merges.txt"]


def is_hub_id(name: str) -> bool:
    """Whether `name` looks like owner/model."""
    return _HUB_ID.fullmatch(name) is not None


def snapshot(name: str, revision: str | None = None, *, refresh: bool = False) -> Path:
    """The local folder of a Hub model; fetched where it is not there yet, brought up to date with `refresh`."""
    folder = fetched(name, _FILES, _is_complete, revision, refresh=refresh)
    if not _is_complete(folder):
        # Without a network the library answers with whatever it has.
        at = f"{name} at {revision}" if revision else name
        raise ModelNotFound(
            f"{at} has no complete safetensors weights here or on the Hub: check the network and the model"
        )
    return folder


def fetched(
    name: str,
    files: list[str],
    complete: Callable[[Path], bool],
    revision: str | None = None,
    *,
    refresh: bool = False,
) -> Path:
    """The local folder with those of a Hub repository's `files` that it has, names or patterns.

    It is fetched where what is here is not `complete`, or with `refresh`; without a network it may still not be.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not refresh:
        try:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=files, local_files_only=True))
            if complete(folder):
                return folder
        except LocalEntryNotFoundError:
            pass
    at = f"{name} at {revision}" if revision else name
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"the Hub asks for permission to use {at}: request it there and run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the Hub has no model {at}, or it is private: check the name or run `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        if (unwritten := _storage_error(error)) is not None:
            raise DecoderyError(
                f"cannot keep {at} in {HF_HUB_CACHE} ({unwritten.strerror}): free some space or set HF_HOME to a "
                "folder that you may write to"
            ) from error
        raise ModelNotFound(
            f"cannot fetch {at} from the Hub ({type(error).__name__}): check the network, or copy the model's folder "
            "here and give its path"
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
