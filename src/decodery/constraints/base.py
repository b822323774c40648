"""What a user asks for: a set of texts, said without tokens."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from decodery.core.abstract import Contract
from decodery.core.errors import ConstraintError, SettingsError
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

__all__ = ["Constraint", "ConstraintSpec"]

_SURROGATE = re.compile(r"[\ud800-\udfff]")
MODES = ("canonical", "strict")
Mode = Literal["canonical", "strict"]

MOST_CHARACTERS = 1 << 20
"""Of a schema, pattern or grammar: what is longer was not written by a person."""


@dataclass(frozen=True)
class ConstraintSpec(Contract):
    """A set of texts, and how forced stretches are spelled in tokens.

    The set of texts is the same.

    Attributes:
        mode: What is allowed inside a stretch of text that is forced, such as a key's name. "canonical": the tokens the
            tokenizer would give it and no others, which models know best. "strict": every token that spells a beginning
            of it, so that the masked model chooses the spelling.
    """

    mode: Mode = field(default="canonical", kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SettingsError(f"the mode of a constraint is {' or '.join(MODES)}, not {self.mode!r}")

    @abstractmethod
    def compile(self, vocabulary: Vocabulary) -> Constraint:
        """The same for a model's tokens.

        Raises:
            ConstraintError: For what cannot be enforced exactly, in full.
        """


def require_text(what: str, text: str, most: int = MOST_CHARACTERS) -> None:
    """Raise ConstraintError for a description beyond the limit, or with characters that no text has."""
    if len(text) > most:
        raise ConstraintError(f"the {what} has {len(text)} characters; the limit is {most}: shorten it")
    if found := _SURROGATE.search(text):
        raise ConstraintError(
            f"the {what} has half a character (U+{ord(found[0]):04X}), which no text can hold: write the whole one"
        )
