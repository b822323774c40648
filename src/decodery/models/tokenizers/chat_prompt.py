"""Chat messages to tokens: the template's control tokens are read as such, and what the messages say is text."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from decodery.core.conversation import PromptTokens
from decodery.core.errors import PromptError

from .chat import ChatTemplate, plain
from .content import Encoded, Span
from .marks import Marks
from .tokenizer import Tokenizer


def chat_tokens(
    chat: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    allow_special: bool = False,
) -> PromptTokens:
    """The prompt for chat messages, as tokens.

    The template is rendered twice: as it is, and with marks around the content of the messages. Where the second text
    without its marks is the first one, all content is known to the character.

    Args:
        chat: the model's template.
        tokenizer: the model's tokenizer.
        messages: `{"role": ..., "content": ...}` each.
        tools: functions that the model may call, for the template.
        allow_special: let special tokens that a message spells be special tokens.

    Returns:
        The tokens, with the spans of what the user says where the template keeps it as it is.

    Raises:
        PromptError: the template refuses the messages, or a message spells a control token and the template changes
            what it says, so that the two cannot be told apart.
    """
    text, turns, content = chat.render(messages, tools=tools), None, None
    given, functions = plain(messages), plain(tools)
    used = json.dumps([given, functions, chat.special], ensure_ascii=False) + chat.source
    for whole in (True, False):
        # Around all that is said; or, where the template looks into that, around nothing but what must be no token.
        marks = Marks(used, tokenizer.spelled)
        try:
            marked = chat.render(marks.messages(given, whole=whole), tools=marks.spelled(functions))
        except PromptError:
            continue
        back, found, torn = marks.read(marked)
        if back != text or not marks.free:
            continue
        users = {
            number
            for number, message in enumerate(given)
            if isinstance(message, dict) and message.get("role") == "user"
        }
        if whole and not any(number in users for number, _ in torn):
            turns = [(number, span) for number, span in found if number in users]
        if not any(spells for _, spells in torn):
            content = [span for _, span in found]
            break
    if content is None and marks.count and not allow_special:
        raise PromptError(
            "a message spells a special token of this model, and the model's chat template changes messages so that "
            "it cannot be kept apart: take it out, or let it be one with allow_special=True"
        )
    encoded = tokenizer.encoding(text) if allow_special else tokenizer.encode_content(text, content or [])
    return PromptTokens(encoded.ids, None if turns is None else _spans(encoded, turns))


def _spans(encoded: Encoded, turns: Sequence[tuple[int | None, Span]]) -> list[Span]:
    """Tokens of each turn. turns: by their numbers the characters of their parts."""
    starts, ends = [first for first, _ in encoded.spans], [last for _, last in encoded.spans]
    found: dict[int | None, Span] = {}
    for number, (begin, end) in turns:
        first, last = bisect_right(ends, begin), bisect_left(starts, end)
        known = found.get(number, (first, last))
        found[number] = min(first, known[0]), max(last, known[1])
    return sorted(span for span in found.values() if span[0] < span[1])
