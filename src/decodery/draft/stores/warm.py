"""Contexts learned from a corpus ahead of time, in a file, for stores of `Contexts` to begin with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CorruptFile, ModelNotFound
from ...model.store import replacing
from .expectations import CONTEXTS

FORMAT = "decodery contexts 1"
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, eq=False)
class WarmContexts:
    """What a model expects after the contexts that it meets most often.

    contexts: {n: [m, n] int64}, the last n tokens, those met most often first; rows: {n: [m, width] int32}, the tokens
    expected after each, likeliest first, -1 for none. rates: [orders, orders, width] float64, how often each place of a
    row turned out right, by the longest order that knew the context and the one the row is of, longest order first.
    vocabulary: that of the model, as in `ModelConfig`. facts: how it was made, as numbers and texts.
    """

    contexts: dict[int, np.ndarray]
    rows: dict[int, np.ndarray]
    rates: np.ndarray
    vocab_size: int
    vocabulary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        from safetensors.numpy import save_file

        # Half the size where all ids fit; the largest number stands for no token.
        kind = np.uint16 if self.vocab_size < 1 << 16 else np.uint32
        tensors = {"rates": self.rates.astype(np.float32)}
        for order, contexts in self.contexts.items():
            tensors[f"contexts.{order}"] = contexts.astype(kind)
            tensors[f"rows.{order}"] = self.rows[order].astype(kind)
        about = {"vocab_size": self.vocab_size, "vocabulary": self.vocabulary, "facts": self.facts}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"format": FORMAT, "about": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> WarmContexts:
        """Raises ModelNotFound where there is no such file, CorruptFile where it holds no contexts."""
        if not path.is_file():
            raise ModelNotFound(
                f"there are no contexts at {path}: make some with decodery train contexts, or correct the path"
            )
        status = path.stat()
        return _load(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _load(path: Path, size: int, changed: int) -> WarmContexts:
    from safetensors import SafetensorError, safe_open

    wrong = f"{path} holds no contexts, or is damaged: make some with decodery train contexts"
    if size > _MOST_BYTES:
        raise CorruptFile(wrong)
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CorruptFile(wrong)
            about = json.loads(metadata["about"])
            names = [name for name in file.keys() if name.startswith("contexts.")]  # noqa: SIM118
            contexts, rows = {}, {}
            for order in sorted((int(name.split(".")[1]) for name in names), reverse=True):
                known = file.get_tensor(f"contexts.{order}")
                ranked = file.get_tensor(f"rows.{order}")
                none = np.iinfo(ranked.dtype).max
                contexts[order] = known.astype(np.int64)
                rows[order] = np.where(ranked == none, -1, ranked.astype(np.int64)).astype(np.int32)
            rates = file.get_tensor("rates").astype(np.float64)
            found = WarmContexts(
                contexts, rows, rates, int(about["vocab_size"]), str(about["vocabulary"]), dict(about["facts"])
            )
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CorruptFile(wrong) from error
    if not _sound(found):
        raise CorruptFile(wrong)
    return found


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
