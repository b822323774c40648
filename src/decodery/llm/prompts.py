"""What may be given as a prompt: a text, chat messages, token ids, or several of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from numbers import Integral
from typing import Any

from decodery.core.conversation import PromptTokens
from decodery.core.errors import PromptError

_ALLOWED = 'a text, chat messages [{"role": "user", "content": "..."}] or token ids'


def single(given: Any) -> Any:
    """One prompt in plain Python, or None where several are given.

    Args:
        given: a text, chat messages, token ids as a list, tuple or array, or an iterable of such prompts.

    Returns:
        A text, a list of messages or `PromptTokens`; None for anything else that can be iterated, which is not read.

    Raises:
        PromptError: this is neither a prompt nor several.
    """
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, str | PromptTokens):
        return given
    if isinstance(given, Iterator):
        return None
    if isinstance(given, Mapping | Set | bytes | bytearray) or not isinstance(given, Iterable):
        raise PromptError(f"a prompt is {_ALLOWED}, or several of these in a list, not {given!r:.60}")
    items = list(given)
    if items and all(isinstance(item, Mapping) for item in items):
        return items
    if items and all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return PromptTokens(int(item) for item in items)
    return None


def one(given: Any) -> Any:
    """The only prompt that is given, as `single` returns it.

    Raises:
        PromptError: For none and for several.
    """
    found = single(given)
    if found is None:
        raise PromptError(f"one prompt is needed here, {_ALLOWED}, not {given!r:.60}")
    if not found:
        raise PromptError("the prompt is empty: give the model something to read")
    return found


def conversations(given: Any) -> tuple[list[list[Any]], bool]:
    """Conversations as lists of messages, and whether several were given.

    Args:
        given: Chat messages, or an iterable of lists of them.

    Raises:
        PromptError: This is something else, such as a text.
    """
    said = 'chat takes messages such as [{"role": "user", "content": "..."}], or a list of such lists'
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise PromptError(f"{said}, not {given!r:.60}: call generate for a text")
    items = list(given)
    if not items:
        raise PromptError(f"{said}, and there is none")
    if all(isinstance(item, Mapping) for item in items):
        return [items], False
    for item in items:
        if isinstance(item, str | Mapping) or not isinstance(item, Iterable) or not _messages(item):
            raise PromptError(f"{said}, not {item!r:.60} in a list: call generate for texts and token ids")
    return [list(item) for item in items], True


def _messages(given: Iterable[Any]) -> bool:
    return all(isinstance(item, Mapping) for item in given)


_ROLES = ("user", "assistant", "system", "developer", "tool", "function")


def check_messages(messages: Iterable[Mapping[str, Any]], template: str) -> None:
    """Refuse messages of which a chat template would make another conversation than was meant.

    Args:
        messages: The messages.
        template: The source of the chat template, which may name further roles.

    Raises:
        PromptError: A role is unknown, or a content is missing or no text.
    """
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES and not (isinstance(role, str) and re.search(f"[\"']{re.escape(role)}[\"']", template)):
            raise PromptError(f"message {number} has the role {role!r:.60}: give user, assistant, system or tool")
        if content is None and role in ("user", "system", "developer"):
            raise PromptError(f"message {number} has no content: give the text that the {role} says")
        if not isinstance(content, str | list | tuple | None):
            raise PromptError(
                f"the content of message {number} is a text or a list of parts, not {type(content).__name__}"
            )


def each(given: Iterable[Any]) -> Iterator[Any]:
    """Several prompts one by one, as `single` returns them.

    Raises:
        PromptError: At the first that is none.
    """
    for prompt in given.tolist() if hasattr(given, "tolist") else given:
        yield one(prompt)
