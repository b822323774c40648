"""What a prompt was made of, so that a search can ask for texts after other prompts than the one it was given."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


class PromptTokens(list[int]):
    """Token ids of a prompt.

    Args:
        user_spans: The tokens of what the user says in each turn, as the first and the last one, the last not included;
            None where that is not known, as of a text without a template.
    """

    def __init__(self, ids: Iterable[int], user_spans: Sequence[tuple[int, int]] | None = None) -> None:
        super().__init__(ids)
        self.user_spans = None if user_spans is None else tuple(user_spans)


@dataclass(frozen=True, eq=False, repr=False)
class Conversation:
    """A prompt before it is rendered.

    Attributes:
        prompt: A text, or chat messages `{"role": ..., "content": ...}`.
        encode: The token ids of such a prompt, by the model's own template.
        compile: What constrains a text, by name or as a language, for this model's tokens.
        apply_chat_template: Whether the prompt is read with the model's chat template.
    """

    prompt: Prompt
    encode: Callable[[Prompt], list[int]]
    compile: Callable[[Any], Any]
    apply_chat_template: bool = True

    def __repr__(self) -> str:
        turns = 1 if isinstance(self.prompt, str) else len(self.prompt)
        return f"Conversation({textwrap.shorten(self.question, 60)!r}, turns={turns})"

    @property
    def question(self) -> str:
        """The text, or the last turn of the user."""
        if isinstance(self.prompt, str):
            return self.prompt
        return next((content_of(turn) for turn in reversed(self.prompt) if turn.get("role") == "user"), "")

    @property
    def task(self) -> str:
        """The question with all turns around it: what a judge of an answer must know.

        Returns:
            The question itself where it is the only turn, else every turn after the name of its role.
        """
        if isinstance(self.prompt, str) or (len(self.prompt) == 1 and self.question):
            return self.question
        return "\n\n".join(f"{turn.get('role')}: {_written(turn)}" for turn in self.prompt)

    def asking(self, text: str) -> Conversation:
        """The same conversation with another question in place of its last one.

        Args:
            text: The question.

        Returns:
            A conversation in which the turns before and after the question stay, such as the results of tools.
        """
        if isinstance(self.prompt, str):
            return replace(self, prompt=text)
        last = max((n for n, turn in enumerate(self.prompt) if turn.get("role") == "user"), default=len(self.prompt))
        asked = {"role": "user", "content": text}
        return replace(self, prompt=[*self.prompt[:last], asked, *self.prompt[last + 1 :]])

    def apart(self, text: str) -> Conversation:
        """A conversation of its own, of which this is all: what a judge reads."""
        return replace(self, prompt=text)

    def tokens(self) -> list[int]:
        return self.encode(self.prompt)


def content_of(turn: Message) -> str:
    """The text of a turn, which may come in parts."""
    content = turn.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _written(turn: Message) -> str:
    """All that a turn says: its text, and the tools that it calls."""
    calls = turn.get("tool_calls")
    said = [content_of(turn), *([json.dumps(calls, default=str)] if calls else [])]
    return "\n".join(filter(None, said))
