"""One of several given texts."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..errors import SettingsError
from ..model.vocabulary import Vocabulary
from ..registry import register
from .base import Language, require_size
from .engine import GrammarConstraint
from .lark import lark


@register("choice", guarantee="every finished text is one of the options")
@dataclass(frozen=True)
class Choice(Language):
    """Writes one of several given texts.

    options: one or more, none of them empty. As text: choice:options=yes/no
    """

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        options = (self.options,) if isinstance(self.options, str) else tuple(self.options)
        if not options or not all(isinstance(option, str) and option for option in options):
            raise SettingsError("choice needs at least one option, and every option must be a text that is not empty")
        object.__setattr__(self, "options", options)

    def compile(self, vocabulary: Vocabulary) -> GrammarConstraint:
        require_size("list of options", "".join(self.options))
        rules = " | ".join(json.dumps(option, ensure_ascii=False) for option in dict.fromkeys(self.options))
        return GrammarConstraint(vocabulary, lark(f"start: {rules}", self.mode))
