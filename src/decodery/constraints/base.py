"""Base class of constraint specifications, which describe a set of texts independent of tokens."""

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
"""Maximum number of characters of a schema, pattern or grammar."""


@dataclass(frozen=True)
class ConstraintSpec(Contract):
    """A set of texts, and how forced text is split into tokens.

    Attributes:
        mode: Allowed tokens of forced text, such as the name of a key; the set of texts does not change. "canonical":
            only the tokens of the tokenizer, which models predict best. "strict": every token that is a prefix of it,
            so that the masked model chooses the split.
    """

    mode: Mode = field(default="canonical", kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SettingsError(f"the mode of a constraint must be {' or '.join(MODES)}, not {self.mode!r}")

    @abstractmethod
    def compile(self, vocabulary: Vocabulary) -> Constraint:
        """Compile the constraint for a model's tokens.

        Raises:
            ConstraintError: If it cannot be enforced exactly and in full.
        """


def require_text(what: str, text: str, most: int = MOST_CHARACTERS) -> None:
    """Raise ConstraintError for a description that is too long, or has characters that no text can have."""
    if len(text) > most:
        raise ConstraintError(f"the {what} has {len(text)} characters; the limit is {most}: shorten it")
    if found := _SURROGATE.search(text):
        raise ConstraintError(
            f"the {what} has half a character (U+{ord(found[0]):04X}), which no text can hold: write the whole one"
        )
