"""Files of tensors that an interrupted run goes on from: written whole, and read by runs of the same settings alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from decodery.core.errors import CorruptFile, SettingsError
from decodery.models.loaders.store import replacing
from decodery.models.trained.artifact import read_tensors


def keep(path: Path, tensors: Mapping[str, torch.Tensor], made: str, **about: str) -> None:
    """Write tensors, what they depend on, and what else is said of them."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"made": made, **about})


@contextmanager
def kept(path: Path, made: str) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """What `keep` has written: the tensors, and what is said of them. It is read inside of the context.

    Raises:
        SettingsError: It depends on something else.
        CorruptFile: It is damaged, or what is read of it is.
    """
    try:
        tensors, about = read_tensors(path)
        if about.get("made") != made:
            raise SettingsError(
                f"{path} was made with other settings or other data: name another folder, or remove that file to start "
                "again"
            )
        yield tensors, about
    except (CorruptFile, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptFile(f"{path} is damaged: remove it and run the command again") from error
