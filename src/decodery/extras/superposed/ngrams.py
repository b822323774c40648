"""How often tokens followed each other in texts one has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import CorruptFile
from decodery.models.loaders.drafts import NGRAMS, shipped
from decodery.models.trained.artifact import Artifact
from decodery.speculative.stores.datastore import SuffixArray

__all__ = ["NGrams", "load_ngrams"]

_KIND = "table of n-grams"
_MADE = "make one with decodery train ngrams -m MODEL"
_END = 2**32 - 1
"""Stands after every text; no token has this id."""


class NGrams:
    """What followed every run of tokens, of any length, in some texts; counted when it is asked for.

    Memory: 8 bytes per token.

    Args:
        shards: Suffix arrays over texts, each text with an end after it.
    """

    def __init__(self, shards: Iterable[SuffixArray] = ()) -> None:
        self.shards = tuple(shards)

    @classmethod
    def count(cls, texts: Iterable[Sequence[int] | np.ndarray]) -> NGrams:
        """Over texts given as token ids; runs do not cross from one text into the next."""
        tokens = [token for text in texts for token in (*text, _END)]
        return cls([SuffixArray.build(np.asarray(tokens, dtype=np.int64))] if tokens else ())

    def __add__(self, other: NGrams) -> NGrams:
        """The counts of both."""
        return NGrams((*self.shards, *other.shards))

    def frequency(self, run: Sequence[int], token: int) -> float:
        """How often `token` followed where `run` stood, between 0 and 1; 0 for a run that nothing followed."""
        return float(self.frequencies(run, np.array([token]))[0])

    def frequencies(self, run: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        """[n] float64: `frequency` of each of `tokens` [n]."""
        total, counts = 0, np.zeros(len(tokens))
        for shard in self.shards:
            begin, end = shard.find(run)
            # Every text has an end after it, so that something follows every run.
            followers = shard.tokens[shard.order[begin:end].astype(np.int64) + len(run)]
            followers = followers[followers != _END]
            total += len(followers)
            counts += (followers[:, None] == tokens).sum(axis=0)
        return counts / max(1, total)


def save_ngrams(
    path: Path, texts: Iterable[Sequence[int] | np.ndarray], vocab_size: int, facts: Mapping[str, Any]
) -> None:
    """Write texts given as token ids to a safetensors file, for `load_ngrams`.

    Args:
        facts: How they came about.
    """
    parts = [np.asarray(text, dtype=np.int64) for text in texts]
    kind = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    tokens = torch.from_numpy(np.concatenate(parts).astype(kind))
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64, device="cpu")
    Artifact(_KIND, {"tokens": tokens, "sizes": sizes}, facts).save(path)


def load_ngrams(path: Path) -> NGrams:
    """Read what `save_ngrams` wrote.

    Raises:
        ModelNotFound: If there is no such file.
        CorruptFile: For anything else.
    """
    found = Artifact.read(path, _KIND, _MADE).tensors
    tokens, sizes = (found[name].numpy() if name in found else np.zeros(()) for name in ("tokens", "sizes"))
    whole = tokens.ndim == sizes.ndim == 1 and tokens.dtype.kind == "u" and sizes.dtype == np.int64
    if not whole or not len(sizes) or sizes.min() < 1 or int(sizes.astype(object).sum()) != len(tokens):
        raise CorruptFile(f"{path} holds no {_KIND}, or is damaged: {_MADE}")
    return NGrams.count(np.split(tokens.astype(np.int64), np.cumsum(sizes)[:-1]))


@lru_cache(maxsize=2)
def ngrams_for(vocabulary: str) -> NGrams:
    """The n-grams shipped for models with this vocabulary (`ModelConfig.vocabulary`), or none."""
    path = shipped(NGRAMS, vocabulary)
    return NGrams() if path is None else load_ngrams(path)
