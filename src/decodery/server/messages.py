"""Messages of a chat request as the model's template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decodery.constraints.tool_calls import END, MARK
from decodery.core.conversation import PromptTokens
from decodery.models.tokenizers.chat_prompt import chat_tokens

from .errors import invalid
from .fields import ChatRequest, Message, Tool

if TYPE_CHECKING:
    from .request_preprocessor import RequestPreprocessor

_TOOL_PROMPT = (
    "You may call tools. Their signatures, as JSON:\n<tools>\n{tools}\n</tools>\n"
    'To call one, answer with:\n<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)
"""For models whose template says nothing of tools."""


def tools_in_use(body: ChatRequest) -> list[Tool]:
    """The tools that an answer may call."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice requires a call, and there are no tools", "tool_choice")
        return []
    return [] if body.tool_choice == "none" else body.tools


def encoded(
    preprocessor: RequestPreprocessor,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    cache_policy: str | None = None,
    *,
    allow_special: bool = False,
) -> tuple[PromptTokens, list[dict[str, Any]]]:
    """Tokens of the prompt for these messages, and the turns that the template made it of.

    Args:
        cache_policy: The policy it is read under.
        allow_special: See `LLM.encode`.
    """
    chat = preprocessor.lm.chat_template
    if chat is None:
        raise invalid("this model has no chat template: use /v1/completions", "messages")
    for message in messages:
        preprocessor.check_length(message.text, cache_policy)
    knows = "tools" in chat.source
    turns = [_turn(message, knows) for message in messages]
    specs = [tool.model_dump(exclude_none=True) for tool in tools]
    if specs and not knows:
        text = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in specs))
        if turns[0]["role"] == "system":
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}
        else:
            turns.insert(0, {"role": "system", "content": text})
    functions = specs if specs and knows else None
    return chat_tokens(chat, preprocessor.lm.tokenizer, turns, tools=functions, allow_special=allow_special), turns


def _turn(message: Message, knows: bool) -> dict[str, Any]:
    """One message. knows: whether the template has a form for calls and what tools answer."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if role == "tool" and not knows:
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if not message.tool_calls:
        return turn
    calls = [{"name": call.function.name, "arguments": _object(call.function.arguments)} for call in message.tool_calls]
    if knows:
        return {**turn, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    said = [f"{MARK}\n{json.dumps(call, ensure_ascii=False)}\n{END}" for call in calls]
    return {**turn, "content": "\n".join(filter(None, [message.text, *said]))}


def _object(arguments: str) -> Any:
    """Arguments as templates take them; what is no JSON stays a text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
