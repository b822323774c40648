"""Contexts learned from a corpus ahead of time, in a file, for stores of `Contexts` to begin with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from decodery.core.copied_pages import CopiedPages
from decodery.models.config import TOKENS
from decodery.models.loaders.fields import Anything, Kind, Named, Text
from decodery.models.trained.artifact import Artifact, TrainedPart, expect

from .contexts import Contexts
from .expectations import CONTEXTS


@dataclass(frozen=True, eq=False)
class WarmContexts(TrainedPart):
    """What a model expects after the contexts that it meets most often.

    Attributes:
        contexts: {n: [m, n] int64}, the last n tokens, those met most often first.
        rows: {n: [m, width] int32}, the tokens expected after each, most likely first, -1 for none.
        rates: [orders, orders, width] float64, how often each place of a row turned out right, by the longest order
            that knew the context and the one the row is of, longest order first.
        vocabulary: That of the model, as in `ModelConfig`.
        facts: How it was made, as numbers and texts.
    """

    KIND = "table of contexts"
    MADE = "make some with decodery train ngram-cache -m MODEL"
    FACTS: ClassVar[Mapping[str, Kind]] = {
        "vocab_size": TOKENS,
        "vocabulary": Text(256),
        "trained": Named(Anything(), 1 << 10),
    }

    contexts: dict[int, np.ndarray]
    rows: dict[int, np.ndarray]
    rates: np.ndarray
    vocab_size: int
    vocabulary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def store(self, width: int) -> Contexts:
        """A store that begins with these contexts; it shares what no text has changed with others.

        Args:
            width: Tokens kept per context.
        """
        return Contexts(CONTEXTS, width, begins=_filled(self, width))

    def artifact(self) -> Artifact:
        # Half the size where all ids fit; the largest number stands for no token.
        kind = np.uint16 if self.vocab_size < 1 << 16 else np.uint32
        tensors = {"rates": self.rates.astype(np.float32)}
        for order, contexts in self.contexts.items():
            tensors[f"contexts.{order}"] = contexts.astype(kind)
            tensors[f"rows.{order}"] = self.rows[order].astype(kind)
        facts = {"vocab_size": self.vocab_size, "vocabulary": self.vocabulary, "trained": self.facts}
        return Artifact(self.KIND, {name: torch.from_numpy(each) for name, each in tensors.items()}, facts)

    @classmethod
    def from_artifact(cls, found: Artifact) -> WarmContexts:
        tensors = {name: tensor.numpy() for name, tensor in found.tensors.items() if tensor.dtype != torch.bfloat16}
        contexts, rows, facts = {}, {}, found.facts
        for order in CONTEXTS:
            known, ranked = (tensors[f"{name}.{order}"] for name in ("contexts", "rows"))
            expect({known.dtype.kind, ranked.dtype.kind} == {"u"} and ranked.ndim == 2)
            contexts[order] = known.astype(np.int64)
            rows[order] = np.where(ranked == np.iinfo(ranked.dtype).max, -1, ranked.astype(np.int64))
        rates = tensors["rates"].astype(np.float64)
        warm = cls(contexts, rows, rates, facts["vocab_size"], facts["vocabulary"], facts["trained"])
        expect(_sound(warm))
        return replace(warm, rows={order: ranked.astype(np.int32) for order, ranked in rows.items()})


@lru_cache(maxsize=4)
def _filled(warm: WarmContexts, width: int) -> CopiedPages:
    """What a store of them holds."""
    contexts = Contexts(CONTEXTS, width)
    for order in CONTEXTS:
        contexts.fill(order, warm.contexts[order], warm.rows[order])
    return contexts.pages


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
