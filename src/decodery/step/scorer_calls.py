"""Texts that scorers generate from their own prompts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from decodery.core.conversation import Conversation, Prompt
from decodery.models.protocol import Reader

from .forward_request import ForwardCoroutine

if TYPE_CHECKING:
    from . import sequence


class ScorerCalls(Protocol):
    """The interface of a scorer to the request whose texts it scores, and to further texts.

    Attributes:
        conversation: Conversation of the request, from which other prompts are made.
        reader: The model that reads these prompts.
        remembered: Results that scorers have stored for this prompt.
    """

    conversation: Conversation
    reader: Reader
    remembered: dict[Hashable, Any]

    def read_by(self, reader: Reader, encode: Callable[[Prompt], list[int]]) -> Self:
        """The same with a second model as the reader.

        Args:
            encode: Its tokens of a prompt.
        """
        ...

    def judge(
        self, prompts: Sequence[Conversation], *, most: int | None = None, logprobs: int | None = None
    ) -> ForwardCoroutine[list[sequence.Sequence]]:
        """Generate a judge's text after each prompt.

        Args:
            prompts: Conversations for the judge.
            most: Maximum tokens of a text; None for the judge's own limit.
            logprobs: Log-probabilities beside each token.
        """
        ...

    def reference(self, n: int) -> ForwardCoroutine[list[sequence.Sequence]]:
        """Generate n answers to the request's own prompt, to compare others with."""
        ...
