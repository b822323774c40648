"""Base class of logits sources, which compute the logits of a text from one or more models and contexts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decodery.core.abstract import Contract
from decodery.core.errors import SettingsError
from decodery.core.requirements import Provides, Requirements
from decodery.models.protocol import LanguageModel, Reader

__all__ = ["LogitsSource"]

EXCLUDED = 1e5
"""Amount by which a source lowers the logits of tokens that it excludes: their probability becomes 0, but they keep the
model's order, so that a constraint which forbids all other tokens still has tokens to choose from."""


@dataclass(frozen=True)
class LogitsSource(Contract):
    """Computes the logits of a request in place of the plain model.

    Fields are settings; texts with equal sources share passes.
    """

    @property
    def requirements(self) -> Requirements:
        """Its requirements on the loaded model."""
        return Requirements()

    @property
    def provides(self) -> Provides:
        """The capabilities of the model that remain, which drafters, rules and searches may require."""
        return Provides(taps=True)

    @property
    def read(self) -> tuple[int, ...]:
        """Tokens that an encoder reads before the text, none where there is no encoder."""
        return ()

    def encoded(self, encode: Callable[[str], list[int]]) -> LogitsSource:
        """This source with its texts turned into token ids."""
        return self

    @abstractmethod
    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        """Make the reader that scores a text with the prompt `prompt`.

        The logits of a row depend only on the tokens before it, never on other rows of the pass, so that drafts, trees
        and batches give the tokens of plain decoding. Two readers are equal if they differ only in the contents of
        their caches; the engine then runs them together.

        Args:
            model: The loaded model.
            prompt: Token ids.
        """


def token_ids(text: str | tuple[int, ...], name: str, setting: str, vocab_size: int) -> tuple[int, ...]:
    """The token ids of a text that replaces the prompt.

    Raises:
        SettingsError: If it is still a text or empty.
    """
    if isinstance(text, str):
        raise SettingsError(f"{name} has a text as {setting}: give its token ids, or decode through `LLM`")
    if not text:
        raise SettingsError(f"{name} needs at least one token as {setting}")
    if not 0 <= min(text) <= max(text) < vocab_size:
        raise SettingsError(f"{name} has token ids as {setting} that are outside the vocabulary of {vocab_size}")
    return text
