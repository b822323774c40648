"""Tokens of models whose vocabulary is unknown: every piece of text gets a number when it is first heard."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from threading import Lock

from ..cache.cache import KVCache
from ..config import ModelConfig

_WORD = re.compile(r"\s*\S+|\s+")
PROMPT = 0
"""The number that stands for a whole prompt, which another part reads."""
MOST_PIECES = 1 << 31


class Pieces:
    """Stands where a tokenizer would.

    Safe to share between threads. Numbers are never used again, so memory grows with the distinct pieces heard; servers
    send tokens, of which there are as many as their model has.

    Args:
        eos_ids: None, for ends come as such.
    """

    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    bos_id = None
    spelled = None

    def __init__(self) -> None:
        # The first two stand for prompts.
        self._texts = ["", ""]
        self._ids: dict[str, int] = {}
        self._lock = Lock()

    def id_of(self, piece: str) -> int:
        """The number of a piece."""
        with self._lock:
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
            return self._ids[piece]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Numbers of its words, which is all that is known of its tokens."""
        return [self.id_of(word) for word in _WORD.findall(text)]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of these numbers.

        Args:
            special: Makes no difference: special tokens are never returned.
        """
        return "".join(self._texts[id] for id in ids)

    def stream(self) -> PieceStream:
        return PieceStream(self)


class PieceStream:
    """Turns numbers into text as they come."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def push(self, ids: Sequence[int]) -> str:
        return self._pieces.decode(ids)

    def finish(self) -> str:
        return ""


def unseen(family: str, positions: int = 1 << 30) -> ModelConfig:
    """The configuration of a model of which nothing is known but that it writes texts."""
    return ModelConfig(MOST_PIECES, 1, 1, 1, 1, 1, 1, max_positions=positions, family=family)


def nothing_read() -> KVCache:
    """The cache of a text that another object reads: it is never written to."""
    return KVCache(1, 1, 1, capacity=1)
