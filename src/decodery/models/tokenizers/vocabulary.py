"""What every id of a model's vocabulary stands for, byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decodery.core.errors import SettingsError

from .tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The texts of a model's tokens, for whatever decides which of them may be written.

    Attributes:
        pieces: [size] bytes of every id, empty where it has no text (ids the model has and the tokenizer lacks, too).
        special_ids: Tokens that are no text, those that end a text among them.
        eos_ids: The latter.
        encode: The tokenizer's own tokens of a text, none added.
    """

    pieces: list[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> Vocabulary:
        """The vocabulary of a model with `size` logits for this tokenizer.

        Args:
            tokenizer: The model's tokenizer.
            size: Logits of the model.
        """
        eos = tuple(id for id in tokenizer.eos_ids if id < size)
        special = frozenset(id for id in (*tokenizer.special_ids, *eos) if id < size)
        pieces = [tokenizer.piece(id) for id in range(size)]
        return cls(pieces, special, eos, lambda text: tokenizer.encode(text, special=False))

    @property
    def size(self) -> int:
        return len(self.pieces)

    def bytes_of(self, tokens: list[int]) -> bytes:
        """The text of some tokens; special ones have none."""
        return b"".join(self.pieces[token] for token in tokens if token not in self.special_ids)

    def holding(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Ids of the tokens that hold any of `texts`.

        Raises:
            SettingsError: For one that no token holds whole.
        """
        found = set[int]()
        for text in texts:
            ids = {id for id, piece in enumerate(self.pieces) if text.encode() in piece} if text else set()
            if not ids:
                raise SettingsError(f"no token of this model holds {text!r}: give shorter texts to break at")
            found |= ids
        return tuple(sorted(found))
