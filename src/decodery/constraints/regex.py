"""Constraint to texts that a regular expression matches as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from decodery.core.registry import register
from decodery.models.tokenizers.vocabulary import Vocabulary

from .base import ConstraintSpec, require_text
from .engine import GrammarConstraint
from .lark import lark
from .pattern import parse, printed
from .size import MOST_PATTERN


@register(
    "regex",
    paper="Efficient Guided Generation for Large Language Models (2023)",
    guarantee="every finished text matches the whole pattern",
    texts=("pattern",),
)
@dataclass(frozen=True)
class Regex(ConstraintSpec):
    """Writes texts that match a regular expression from the first character to the last.

    Look-around, back-references and word boundaries are not regular, and are refused. Published engines precompute an
    index over states and tokens; here states are derived during decoding, so that compiling takes almost no time.

    Attributes:
        pattern: As in JSON Schema and JavaScript: `.` is any character but an end of line, \\d and \\w are ASCII.
    """

    pattern: str

    def compile(self, vocabulary: Vocabulary) -> GrammarConstraint:
        require_text("pattern", self.pattern, MOST_PATTERN)
        rules = f"start: /{printed(parse(self.pattern, whole=True))}/"
        return GrammarConstraint(vocabulary, lark(rules, self.mode), stops=True)
