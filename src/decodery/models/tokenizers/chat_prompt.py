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
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
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
        variables: further switches of the template, such as {"enable_thinking": False}.
        continue_final_message: end with the last message, so that the model goes on with it.
        allow_special: let special tokens that a message spells be special tokens.

    Returns:
        The tokens, with the spans of what the user says where the template keeps it as it is.

    Raises:
        PromptError: the template refuses the messages; or a message spells a control token and the template changes
            what it says, so that the two cannot be told apart; or it changes a last message that is to be continued.
    """
    given, functions, switches = plain(messages), plain(tools), plain(variables or {})
    _refuse_reserved(chat, switches)
    begins = not continue_final_message
    text, turns, content = chat.render(given, add_generation_prompt=begins, tools=functions, **switches), None, None
    used = json.dumps([given, functions, switches, chat.special], ensure_ascii=False) + chat.source
    for whole in (True, False):
        # Around all that is said; or, where the template looks into that, around nothing but what must be no token.
        marks = Marks(used, tokenizer.spelled)
        try:
            turned, called = marks.messages(given, whole=whole), marks.spelled(functions)
            marked = chat.render(turned, add_generation_prompt=begins, tools=called, **marks.spelled(switches))
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
    if continue_final_message:
        text = text[: _end_of_last(text, given)]
        turns = None if turns is None else [(number, _before(span, len(text))) for number, span in turns]
        content = None if content is None else [_before(span, len(text)) for span in content]
    encoded = tokenizer.encoding(text) if allow_special else tokenizer.encode_content(text, content or [])
    return PromptTokens(encoded.ids, None if turns is None else _spans(encoded, turns))


def _refuse_reserved(chat: ChatTemplate, variables: Mapping[str, Any]) -> None:
    """Raise PromptError for a variable that stands for something else in every template."""
    reserved = {"messages", "tools", "documents", "add_generation_prompt", *chat.special}
    if taken := sorted(reserved & variables.keys()):
        raise PromptError(
            f"chat_template_kwargs cannot set {taken[0]!r}: it is set by the request and the model itself"
        )


def _end_of_last(text: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """Where the last message ends in a rendered text."""
    content = messages[-1].get("content") if messages else None
    said = content if isinstance(content, str) else ""
    for shown in (said, said.strip()):
        if shown.strip() and (at := text.rfind(shown)) >= 0:
            return at + len(shown)
    raise PromptError(
        "continue_final_message needs a last message with a text that the chat template keeps as it is: leave it out"
    )


def _before(span: Span, end: int) -> Span:
    """The part of a span of characters before an end."""
    return min(span[0], end), min(span[1], end)


def _spans(encoded: Encoded, turns: Sequence[tuple[int | None, Span]]) -> list[Span]:
    """Tokens of each turn. turns: by their numbers the characters of their parts."""
    starts, ends = [first for first, _ in encoded.spans], [last for _, last in encoded.spans]
    found: dict[int | None, Span] = {}
    for number, (begin, end) in turns:
        first, last = bisect_right(ends, begin), bisect_left(starts, end)
        known = found.get(number, (first, last))
        found[number] = min(first, known[0]), max(last, known[1])
    return sorted(span for span in found.values() if span[0] < span[1])
