"""Chat templates: from the turns of a conversation to the text a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decodery.core.errors import CorruptFile, PromptError
from decodery.core.worker_pool import NotStarted, Unanswered, WorkerPool

_MOST_SOURCE = 1 << 20
_SECONDS = 10.0
"""For one prompt, of which the longest take a tenth of a second."""
_MEMORY = 1 << 30
_MOST_LITERAL, _MOST_REPEATED = 1 << 20, 16
"""Characters a prompt may have: so many, and this many times what is given to the template."""


renderers = WorkerPool(Path(__file__).with_name("chat_worker.py"), memory=_MEMORY)
"""Processes that render templates; one starts in a tenth of a second."""


class ChatTemplate:
    """A Jinja template that comes with a model and is not trusted.

    It is rendered in a sandbox in another process, which begins with the first template, is shared by all and is ended
    where a prompt takes it more than 10 seconds or 1 GiB.

    Args:
        special: Texts of the special tokens it may name, such as {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        if len(source) > _MOST_SOURCE:
            raise CorruptFile("the model's chat template is longer than any template: the model's files are damaged")
        self.source = source
        self.special = dict(special or {})
        # It is ready by the time the weights are read and the first prompt arrives.
        renderers.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages ({"role": ..., "content": ...}).

        Args:
            add_generation_prompt: End with what begins the model's turn.
            variables: Further switches of the template.

        Raises:
            PromptError: If the template does not accept the messages, or reaches the limits with them.
        """
        try:
            given = {**self.special, **plain(variables), "messages": plain(messages), "tools": plain(tools)}
            given |= {"add_generation_prompt": add_generation_prompt, "documents": None}
            most = _MOST_LITERAL + _MOST_REPEATED * len(json.dumps(given))
        except (ValueError, RecursionError) as error:
            raise PromptError("a chat message holds a number too long, or lists nested too deep, to be sent") from error
        try:
            reply = renderers.ask({"source": self.source, "given": given, "most": most}, _SECONDS)
        except Unanswered as error:
            raise PromptError(
                f"the model's chat template was stopped on these messages: {error}; give the prompt as plain text"
            ) from error
        except NotStarted as error:
            raise PromptError(
                "the process for chat templates does not start: check that `python -c 'import jinja2'` works, or give "
                "the prompt as plain text"
            ) from error
        if "text" in reply:
            return str(reply["text"])
        if "invalid" in reply:
            raise CorruptFile(f"the model's chat template is not valid Jinja: {reply['invalid']}")
        if "refused" in reply:
            raise PromptError(f"the model's chat template refuses these messages: {reply['refused']}")
        raise PromptError(f"the model's chat template fails on these messages: {reply['failed']}")


def plain(value: Any) -> Any:
    """A copy of plain data, which is all that another process can be told."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    raise PromptError(f"a chat message holds a {type(value).__name__}; only texts, numbers, lists and mappings can be")
