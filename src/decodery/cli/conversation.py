"""The conversation of `decodery chat`: its messages, and what it drops where the model's context is full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodery.core.errors import ContextFull, SettingsError

if TYPE_CHECKING:
    from decodery.llm.llm import LLM, Output

Message = dict[str, str]


class Conversation:
    """The messages so far, and the last output, whose cache the next turn goes on with.

    Args:
        lm: The model.
        settings: Decoding settings of every answer, as `LLM.request` takes them, and `diffuse`.

    Raises:
        SettingsError: The model has no chat template.
    """

    def __init__(self, lm: LLM, settings: dict[str, Any]) -> None:
        self.lm = lm
        self.settings = settings
        self.system: list[Message] = []
        self.messages: list[Message] = []
        self.last: Output | None = None
        try:
            lm.encode([_message("user", "Hello")])
        except SettingsError as error:
            raise SettingsError(
                f"{lm.name} has no chat template, so it has no turns: continue a text with decodery generate"
            ) from error

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages, self.last = [], None

    def instruct(self, text: str) -> None:
        """Put a system message before all turns, or take it away where `text` is empty.

        Args:
            text: The message.

        Raises:
            PromptError: The model's chat template takes no such message, which then stays as it was.
        """
        system = [_message("system", text)] if text else []
        self.lm.encode([*system, *self.messages, _message("user", "Hello")])
        self.system = system

    def save(self, path: Path) -> None:
        """Write all messages to a new file, as a JSON list that `LLM.generate` takes as a prompt.

        Args:
            path: The file.

        Raises:
            SettingsError: There is such a file, or it cannot be written.
        """
        if path.exists():
            raise SettingsError(f"{path} exists already: name a new file")
        try:
            text = json.dumps([*self.system, *self.messages], ensure_ascii=False, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"cannot write {path} ({error.strerror}): name another file") from error

    def say(
        self, text: str, write: Callable[[str], None], dropped: Callable[[int], None] = lambda turns: None
    ) -> Output:
        """The answer to `text`. A turn that fails, or is stopped before its first word, leaves no trace.

        Args:
            text: What the user says.
            write: Called with each piece of the answer.
            dropped: Called with the number of turns that are dropped because the context is full, where some are.

        Returns:
            The answer.

        Raises:
            ContextFull: This turn alone does not fit the model's context.
        """
        from .decode import decode, fill

        messages, tokens, turns = self._fitted(text)
        if turns:
            dropped(turns)
        settings = dict(self.settings)
        if (method := settings.pop("diffuse", None)) is not None:
            (output,) = fill(
                self.lm, [self.lm.fill(tokens, method, settings.pop("max_new_tokens", 256), **settings)], write
            )
        else:
            prompt = [*self.system, *messages]
            request = self.lm.request_for(prompt, tokens=tokens, reuse=self.last, **settings)
            (output,) = decode(self.lm, [request], write, return_cache=True)
        if output.text:
            self.messages = [*messages, _message("assistant", output.text)]
            self.last = output
        return output

    def _fitted(self, text: str) -> tuple[list[Message], list[int], int]:
        """The messages that are kept with a new turn, the tokens of the prompt, and how many turns are dropped."""
        kept = [*self.messages, _message("user", text)]
        tokens = self.lm.encode([*self.system, *kept])
        context, answer = self.context, self.settings.get("max_new_tokens", 256)
        if self.settings.get("diffuse") is None:
            # A shorter answer is better than a shorter memory.
            answer = min(answer, context // 4)
        if len(tokens) + answer <= context:
            return kept, tokens, 0
        turns = 0
        while len(kept) > 1 and len(tokens) + max(answer, context // 2) > context:
            # Down to half, so that the next turns go on from what is read and drop nothing.
            kept, turns = kept[2:], turns + 1
            tokens = self.lm.encode([*self.system, *kept])
        if len(tokens) >= context:
            beside = " with the system message" if self.system else ""
            raise ContextFull(
                f"this turn has {len(tokens)} tokens{beside}, and the model's context {context}: shorten it"
            )
        return kept, tokens, turns

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        from decodery.llm.resolve_settings import resolve_cache_policy
        from decodery.models.config import POSITIONS

        config = self.lm.model.config
        policy = resolve_cache_policy(self.settings.get("cache_policy"))
        return POSITIONS.most if policy is not None and policy.endless(config) else config.max_positions


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
