"""Prompts that hold embeddings, in a file: what a model that was shown images writes its texts to learn from after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from decodery.core.errors import CorruptFile, PromptError
from decodery.models.loaders.load import LoadedModel
from decodery.models.loaders.store import Progress, silent
from decodery.models.protocol import Reader
from decodery.models.trained.artifact import Artifact, refuse_other
from decodery.step.embedded import Embeddings

from .corpus import Corpus
from .data import write_texts
from .tensors import int_tensor

KIND = "set of prompts with embeddings"
_MADE = "make one with decodery.training.embedded.save_prompts"


@dataclass(frozen=True, eq=False)
class Shown:
    """Texts whose prompts hold embeddings, and those of each."""

    corpus: Corpus
    embeddings: Sequence[Embeddings]


def write_shown(
    target: LoadedModel,
    prompts: Sequence[tuple[Sequence[int], Embeddings]],
    out: Path,
    count: int,
    max_new_tokens: int,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> Shown:
    """Let `target` write `count` texts after these prompts, in turns.

    Those that are in the folder `out` are read.
    """
    tokens, embeddings = zip(*(prompts[number % len(prompts)] for number in range(count)), strict=True)
    corpus = write_texts(
        target, tokens, out, max_new_tokens=max_new_tokens, seed=seed, embeddings=embeddings, progress=progress
    )
    return Shown(corpus, embeddings)


def save_prompts(path: Path, prompts: Sequence[tuple[Sequence[int], Embeddings]], model: Reader) -> None:
    """Write prompts for `model`: token ids, and what they hold beside them (see `Embeddings.placed`)."""
    if not prompts:
        raise PromptError("there are no prompts to keep: give at least one")
    for tokens, embeddings in prompts:
        embeddings.check(tokens, model)
    tensors = {
        "tokens": torch.cat([int_tensor(list(tokens)) for tokens, _ in prompts]),
        "sizes": int_tensor([len(tokens) for tokens, _ in prompts]),
        "places": torch.cat([torch.from_numpy(each.places.astype(np.int64)) for _, each in prompts]),
        "held": int_tensor([len(each.places) for _, each in prompts]),
        "rows": torch.cat([each.rows.float() for _, each in prompts]),
    }
    Artifact(KIND, tensors, {}, model.fingerprint).save(path)


def read_prompts(path: Path, model: Reader) -> list[tuple[list[int], Embeddings]]:
    """What `save_prompts` wrote."""
    found = Artifact.read(path, KIND, _MADE)
    refuse_other("this set of prompts", found.model, model, _MADE)
    try:
        tokens, sizes, places, held, rows = (
            found.tensors[name] for name in ("tokens", "sizes", "places", "held", "rows")
        )
        parts = (tokens.split(sizes.tolist()), places.split(held.tolist()), rows.split(held.tolist()))
        prompts = [(ids.tolist(), Embeddings(at.numpy(), each)) for ids, at, each in zip(*parts, strict=True)]
        for ids, embeddings in prompts:
            embeddings.check(ids, model)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path} does not fit together: {_MADE}") from error
    return prompts
