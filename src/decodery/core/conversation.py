"""What a prompt was made of, so that a search can ask for texts behind other prompts than the one it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


@dataclass(frozen=True, eq=False)
class Conversation:
    """A prompt before it is rendered. prompt: a text, or chat messages `{"role": ..., "content": ...}`.

    encode: the token ids of such a prompt, by the model's own template. compile: what constrains a text, by name or as
    a language, for this model's tokens. raw: whether the prompt is read without the model's chat template.
    """

    prompt: Prompt
    encode: Callable[[Prompt], list[int]]
    compile: Callable[[Any], Any]
    raw: bool = False

    @property
    def question(self) -> str:
        """The text, or the last turn of the user."""
        if isinstance(self.prompt, str):
            return self.prompt
        turns = [turn.get("content") for turn in self.prompt if turn.get("role") == "user"]
        return turns[-1] if turns and isinstance(turns[-1], str) else ""

    def asking(self, text: str) -> Conversation:
        """The same conversation with another question in place of its last one; what went before it stays."""
        if isinstance(self.prompt, str):
            return replace(self, prompt=text)
        last = max((n for n, turn in enumerate(self.prompt) if turn.get("role") == "user"), default=len(self.prompt))
        return replace(self, prompt=[*self.prompt[:last], {"role": "user", "content": text}])

    def apart(self, text: str) -> Conversation:
        """A conversation of its own, of which this is all: what a judge reads."""
        return replace(self, prompt=text)

    def tokens(self) -> list[int]:
        return self.encode(self.prompt)
