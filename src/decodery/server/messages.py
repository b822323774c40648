"""Messages of a chat request as the model's template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decodery.core.conversation import PromptTokens
from decodery.llm.chat_answer import described

from .errors import invalid
from .fields import ChatRequest, Message
from .request_preprocessor import RequestPreprocessor
from .tool_fields import Tool
from .wire import loads


def tools_in_use(body: ChatRequest) -> list[Tool]:
    """The tools that an answer may call."""
    tools, chosen = body.offered, body.choice_of_tools
    if not tools and chosen not in (None, "none", "auto"):
        raise invalid("tool_choice requires a call, and there are no tools", "tool_choice")
    return [] if chosen == "none" else tools


def encoded(
    preprocessor: RequestPreprocessor,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    cache_policy: str | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    allow_special: bool = False,
) -> tuple[PromptTokens, list[Mapping[str, Any]]]:
    """Tokens of the prompt for these messages, and the turns that the template made it of.

    Args:
        preprocessor: Has the model.
        messages: The messages.
        tools: Tools that the answer may call.
        cache_policy: The policy it is read under.
        variables: See `chat_template_kwargs` of `LLM.encode`.
        continue_final_message: See `LLM.encode`.
        allow_special: See `LLM.encode`.
    """
    chat = preprocessor.lm.chat_template
    if chat is None:
        raise invalid("this model has no chat template: use /v1/completions", "messages")
    for number, message in enumerate(messages):
        if message.content is None and message.role not in ("assistant", "function"):
            where = f"messages.{number}.content"
            raise invalid(f"{where} is missing: give a text, the empty one if there is nothing to say", where)
        preprocessor.check_length(message.text, cache_policy)
    turns = [_turn(message) for message in messages]
    specs = [tool.model_dump(exclude_none=True) for tool in tools]
    tokens = preprocessor.lm.encode(
        turns,
        tools=specs,
        chat_template_kwargs=variables,
        continue_final_message=continue_final_message,
        allow_special=allow_special,
    )
    assert isinstance(tokens, PromptTokens)
    return tokens, described(turns, specs, chat.source)[0]


def _turn(message: Message) -> dict[str, Any]:
    """One message as chat templates take it."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    given = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning_content}
    turn = {"role": role, "content": message.text, **{name: each for name, each in given.items() if each is not None}}
    calls = [{"name": call.name, "arguments": _object(call.arguments)} for call in message.calls]
    return turn | ({"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {})


def _object(arguments: str) -> Any:
    """Arguments as templates take them; what is no JSON stays a text."""
    try:
        return loads(arguments)
    except (ValueError, RecursionError):
        return arguments
