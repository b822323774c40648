"""Constraint to texts that a function accepts."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.core.requirements import Provides
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint

from .base import ConstraintSpec

Check = Callable[[str], bool]

_CUT = "\ufffd"
"""Replaces an incomplete character at the end, as in decoded texts."""


@register(
    "checker",
    guarantee="`complete` accepts every finished text, and `prefix` every prefix of it",
    requirements=("a Python function",),
)
@dataclass(frozen=True)
class Checker(ConstraintSpec):
    """Writes texts that a function accepts; the function is called for one token at a time.

    Both functions get the text so far, and must depend only on it. If a token ends within a character, `prefix` gets a
    U+FFFD at the end. There is no mask, so requests with the default acceptance rule use `awrs`, which writes the same
    texts. Searches that need a mask check the whole vocabulary.

    Attributes:
        prefix: Whether a text can still become an accepted one; it must never reject one that can.
        complete: Whether a text may end, None where every prefix may.
    """

    prefix: Check
    complete: Check | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.prefix) or not (self.complete is None or callable(self.complete)):
            raise SettingsError("checker needs functions of a text that say True or False: build it in Python")

    def compile(self, vocabulary: Vocabulary) -> CheckerConstraint:
        return CheckerConstraint(vocabulary, self.prefix, self.complete)


class _CheckerState:
    """State of a text.

    Attributes:
        text: Complete characters.
        rest: The bytes of an incomplete character.
        ended: None before an end token, then whether the text was complete.
        wrong: Whether a token was rejected.
        verdicts: Results of the checks so far, by token.
    """

    __slots__ = ("ended", "rest", "text", "verdicts", "wrong")

    def __init__(self, text: str, rest: bytes = b"", *, ended: bool | None = None, wrong: bool = False) -> None:
        self.text = text
        self.rest = rest
        self.ended = ended
        self.wrong = wrong
        self.verdicts: dict[int, bool] = {}


class CheckerConstraint(Constraint):
    """A `Checker` over a model's tokens. Special tokens and those without a text are never accepted."""

    provides = Provides()

    def __init__(self, vocabulary: Vocabulary, prefix: Check, complete: Check | None) -> None:
        self.vocabulary = vocabulary
        self._prefix = prefix
        self._complete = complete

    def init(self, prompt: Sequence[int]) -> _CheckerState:
        return _CheckerState("")

    def accepts(self, state: _CheckerState, token: int) -> bool:
        if token not in state.verdicts:
            state.verdicts[token] = self._judge(state, token)
        return state.verdicts[token]

    def allowed(self, state: _CheckerState) -> np.ndarray:
        return np.fromiter((self.accepts(state, token) for token in range(self.vocabulary.size)), dtype=bool)

    def advance(self, state: _CheckerState, token: int) -> _CheckerState:
        if token in self.vocabulary.eos_ids:
            return _CheckerState(state.text, state.rest, ended=self.is_complete(state), wrong=state.wrong)
        found = None if state.ended is not None else self._after(state, token)
        return (
            _CheckerState(state.text, state.rest, wrong=True)
            if found is None
            else _CheckerState(*found, wrong=state.wrong)
        )

    def is_complete(self, state: _CheckerState) -> bool:
        if state.ended is not None or state.wrong:
            return bool(state.ended) and not state.wrong
        return not state.rest and (self._complete is None or bool(self._complete(state.text)))

    def _judge(self, state: _CheckerState, token: int) -> bool:
        if token in self.vocabulary.eos_ids:
            # A rejected text may only end, so that rejected drafts have a distribution too.
            return state.ended is not None or state.wrong or self.is_complete(state)
        if state.ended is not None or state.wrong or (found := self._after(state, token)) is None:
            return False
        text, rest = found
        return bool(self._prefix(text + _CUT if rest else text))

    def _after(self, state: _CheckerState, token: int) -> tuple[str, bytes] | None:
        """Text and incomplete character after one more token; None for tokens without text and for invalid UTF-8."""
        piece = self.vocabulary.pieces[token]
        if not piece or token in self.vocabulary.special_ids:
            return None
        decoder = getincrementaldecoder("utf-8")()
        try:
            added = decoder.decode(state.rest + piece)
        except UnicodeDecodeError:
            return None
        return state.text + added, decoder.getstate()[0]
