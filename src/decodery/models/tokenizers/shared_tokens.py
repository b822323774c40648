"""The tokens that two vocabularies share: those of equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from .tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Tokens of two vocabularies that stand for the same bytes.

    Attributes:
        own, other: [n] int64, the ids of each in the one vocabulary and in the other; no id stands twice.
        size: How many ids the first vocabulary has.
    """

    own: np.ndarray
    other: np.ndarray
    size: int

    @cached_property
    def others(self) -> np.ndarray:
        """[size] int64: the id in the other vocabulary, -1 of what is not shared."""
        found = np.full(self.size, -1, dtype=np.int64)
        found[self.own] = self.other
        return found

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.own), torch.from_numpy(self.other)

    def translated(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [..., size] of the first vocabulary: minus infinity for what is not shared.

        Args:
            logits: [..., other vocabulary].
        """
        own, other = (ids.to(logits.device) for ids in self._rows)
        found = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        found[..., own] = logits[..., other]
        return found


@lru_cache(maxsize=8)
def shared_tokens(own: Tokenizer, other: Tokenizer, sizes: tuple[int, int]) -> SharedTokens:
    """What two vocabularies share, control tokens aside.

    Args:
        own, other: The two tokenizers.
        sizes: How many ids each model has.
    """
    ours, theirs = (_by_bytes(each, size) for each, size in zip((own, other), sizes, strict=True))
    both = sorted((id, theirs[piece]) for piece, id in ours.items() if piece in theirs)
    pairs = np.array(both, dtype=np.int64).reshape(-1, 2)
    return SharedTokens(pairs[:, 0].copy(), pairs[:, 1].copy(), sizes[0])


def _by_bytes(tokenizer: Tokenizer, size: int) -> Mapping[bytes, int]:
    """The id of every text that a single token stands for."""
    found: dict[bytes, int] = {}
    twice: dict[bytes, list[int]] = {}
    for id in range(min(size, tokenizer.backend.get_vocab_size(with_added_tokens=True))):
        piece = tokenizer.piece(id)
        if not piece or id in tokenizer.control_ids:
            continue
        if found.setdefault(piece, id) != id:
            twice.setdefault(piece, [found[piece]]).append(id)
    # A byte and the letter of that byte may both be tokens: the one that the tokenizer cuts a text into is meant.
    for piece, ids in twice.items():
        written = tokenizer.encode_after(piece.decode("utf-8", "replace"))
        found[piece] = next((id for id in ids if written == [id]), ids[0])
    return found
