"""What a logit source is: it makes one stream of logits out of one or more models and contexts."""

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
"""What the logits of tokens that a source leaves out are lowered by: to probability 0, and still in the model's order,
so that a constraint which forbids all others finds something to choose from."""


@dataclass(frozen=True)
class LogitsSource(Contract):
    """What a request is scored by in place of the model alone.

    Fields are settings; equal ones share their passes.
    """

    @property
    def requirements(self) -> Requirements:
        """What it must find of the loaded model."""
        return Requirements()

    @property
    def provides(self) -> Provides:
        """What of the model can still be had through it, which drafters, rules and searches may need."""
        return Provides(taps=True)

    @property
    def read(self) -> tuple[int, ...]:
        """What an encoder reads before the text, none where there is no encoder."""
        return ()

    def encoded(self, encode: Callable[[str], list[int]]) -> LogitsSource:
        """This source with its texts turned into token ids."""
        return self

    @abstractmethod
    def over(self, model: LanguageModel, prompt: Sequence[int]) -> Reader:
        """What scores a text that begins with `prompt`; `model` is the one that was loaded.

        A row's logits depend on the tokens before it alone, never on what else is in a pass, so that drafts, trees and
        batches give the tokens of plain decoding. Two of them compare equal where they score alike and differ in
        what their caches hold only: the engine then runs them together.

        Args:
            model: The model that was loaded.
            prompt: Token ids.
        """


def token_ids(text: str | tuple[int, ...], name: str, setting: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of a text that stands in the prompt's place.

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
