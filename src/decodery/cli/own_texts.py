"""Texts that a model writes for its own parts to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingsError

if TYPE_CHECKING:
    from ..model.load import LoadedModel
    from ..model.store import Progress
    from ..train.corpus import Corpus


def prompts_for(texts: int, prompts: Path | None) -> list[str]:
    """The lines of the file of prompts, none where there is no file."""
    from ..train.data import read_prompts

    if texts < 20:
        raise SettingsError(f"{texts} texts are too few to learn from and to hold some out: write at least 20")
    return read_prompts(prompts) if prompts else []


def own_texts(
    loaded: LoadedModel,
    folder: Path,
    texts: int,
    lines: list[str],
    max_new_tokens: int,
    seed: int,
    top: int,
    progress: Progress,
) -> Corpus:
    """The texts that the model writes from `lines`, or from built-in instructions, in `folder`."""
    from ..lm import LM
    from ..train.data import built_in_prompts, write_texts

    if lines:
        # They are used again, with other seeds, until there are enough texts.
        encoded = [LM(loaded).encode(line) for line in lines[:texts]]
        wanted = [encoded[number % len(encoded)] for number in range(texts)]
    else:
        wanted = built_in_prompts(loaded, texts, seed)
    return write_texts(loaded, wanted, folder, max_new_tokens=max_new_tokens, seed=seed, top=top, progress=progress)
