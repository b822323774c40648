"""How texts are spelled in a vocabulary's tokens."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from decodery.core.errors import UnsupportedModel
from decodery.models.tokenizers.vocabulary import Vocabulary

_MARK = "\x02"


def end_mask(vocabulary: Vocabulary) -> np.ndarray:
    """[vocab] bool: the end tokens.

    Raises:
        UnsupportedModel: If there are none.
    """
    if not vocabulary.eos_ids:
        raise UnsupportedModel("the model has no end token, so a constrained text could not end")
    mask = np.zeros(vocabulary.size, dtype=bool)
    mask[list(vocabulary.eos_ids)] = True
    mask.flags.writeable = False
    return mask


def spelled(text: str, vocabulary: Vocabulary) -> list[int]:
    """The tokenizer's own tokens of a text inside another one; special tokens are read as text."""
    tokens: list[int] = []
    for token in _inside(text, vocabulary):
        name = vocabulary.pieces[token].decode("utf-8", "replace") if token in vocabulary.special_ids else ""
        # What a tokenizer takes for a special token is no longer one in two parts.
        tokens += [*spelled(name[:1], vocabulary), *spelled(name[1:], vocabulary)] if len(name) > 1 else [token]
    return tokens


def _inside(text: str, vocabulary: Vocabulary) -> list[int]:
    """As the tokenizer has it: it may put a space before what begins a text, but not before what follows a mark."""
    tokens = vocabulary.encode(_MARK + text)
    for count in range(1, len(tokens)):
        if vocabulary.bytes_of(tokens[:count]).lstrip() == _MARK.encode():
            return tokens[count:]
    return vocabulary.encode(text)


_known: WeakKeyDictionary[Vocabulary, tuple[list[bytes], list[int]]] = WeakKeyDictionary()


def sorted_pieces(vocabulary: Vocabulary) -> tuple[list[bytes], list[int]]:
    """The texts of a vocabulary's tokens in order, and their ids; special tokens write none."""
    found = _known.get(vocabulary)
    if found is None:
        plain = (
            (piece, id) for id, piece in enumerate(vocabulary.pieces) if piece and id not in vocabulary.special_ids
        )
        ordered = sorted(plain)
        found = _known[vocabulary] = [piece for piece, _ in ordered], [id for _, id in ordered]
    return found
