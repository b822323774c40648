"""Contexts learned from a corpus ahead of time, in a file, for stores of `Contexts` to begin with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decodery.core.errors import CorruptFile
from decodery.models.config import TOKENS
from decodery.models.loaders.fields import Anything, Named, Text
from decodery.models.trained.artifact import Artifact, remembered

from .expectations import CONTEXTS

_KIND = "table of contexts"
_MADE = "make some with decodery train ngram-cache -m MODEL"
_FACTS = {"vocab_size": TOKENS, "vocabulary": Text(256), "trained": Named(Anything(), 1 << 10)}


@dataclass(frozen=True, eq=False)
class WarmContexts:
    """What a model expects after the contexts that it meets most often.

    Attributes:
        contexts: {n: [m, n] int64}, the last n tokens, those met most often first.
        rows: {n: [m, width] int32}, the tokens expected after each, most likely first, -1 for none.
        rates: [orders, orders, width] float64, how often each place of a row turned out right, by the longest order
            that knew the context and the one the row is of, longest order first.
        vocabulary: That of the model, as in `ModelConfig`.
        facts: How it was made, as numbers and texts.
    """

    contexts: dict[int, np.ndarray]
    rows: dict[int, np.ndarray]
    rates: np.ndarray
    vocab_size: int
    vocabulary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        # Half the size where all ids fit; the largest number stands for no token.
        kind = np.uint16 if self.vocab_size < 1 << 16 else np.uint32
        tensors = {"rates": self.rates.astype(np.float32)}
        for order, contexts in self.contexts.items():
            tensors[f"contexts.{order}"] = contexts.astype(kind)
            tensors[f"rows.{order}"] = self.rows[order].astype(kind)
        facts = {"vocab_size": self.vocab_size, "vocabulary": self.vocabulary, "trained": self.facts}
        Artifact(_KIND, {name: torch.from_numpy(each) for name, each in tensors.items()}, facts).save(path)

    @classmethod
    def load(cls, path: Path) -> WarmContexts:
        """Raises ModelNotFound where there is no such file, CorruptFile where it holds no contexts."""
        return _load(path)


@remembered
def _load(path: Path) -> WarmContexts:
    read = Artifact.read(path, _KIND, _MADE, _FACTS)
    tensors = {name: tensor.numpy() for name, tensor in read.tensors.items() if tensor.dtype != torch.bfloat16}
    contexts, rows = {}, {}
    for order in CONTEXTS:
        known, ranked = (tensors.get(f"{name}.{order}") for name in ("contexts", "rows"))
        if known is None or ranked is None or {known.dtype.kind, ranked.dtype.kind} != {"u"} or ranked.ndim != 2:
            raise CorruptFile(f"{path} holds no table of contexts, or is damaged: {_MADE}")
        contexts[order] = known.astype(np.int64)
        rows[order] = np.where(ranked == np.iinfo(ranked.dtype).max, -1, ranked.astype(np.int64))
    rates = tensors.get("rates", np.zeros(0)).astype(np.float64)
    facts = read.facts
    found = WarmContexts(contexts, rows, rates, facts["vocab_size"], facts["vocabulary"], facts["trained"])
    if not _sound(found):
        raise CorruptFile(f"{path} holds no table of contexts, or is damaged: {_MADE}")
    return replace(found, rows={order: ranked.astype(np.int32) for order, ranked in rows.items()})


def _sound(warm: WarmContexts) -> bool:
    orders = len(warm.contexts)
    if tuple(warm.contexts) != CONTEXTS or warm.rates.ndim != 3 or warm.rates.shape[:2] != (orders, orders):
        return False
    for order, contexts in warm.contexts.items():
        rows = warm.rows[order]
        if contexts.shape != (len(rows), order) or rows.shape[1:] != warm.rates.shape[2:]:
            return False
        if len(rows) and (contexts.max() >= warm.vocab_size or rows.max() >= warm.vocab_size):
            return False
    return bool(((warm.rates >= 0) & (warm.rates <= 1)).all())
