"""Messages of a chat request as the model's template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
) -> tuple[PromptTokens, list[dict[str, Any]]]:
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
    tokens = chat_tokens(
        chat,
        preprocessor.lm.tokenizer,
        turns,
        tools=functions,
        variables=variables,
        continue_final_message=continue_final_message,
        allow_special=allow_special,
    )
    return tokens, turns


def _turn(message: Message, knows: bool) -> dict[str, Any]:
    """One message. knows: whether the template has a form for calls and what tools answer."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    turn: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if role == "tool" and not knows:
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    if not message.calls:
        return turn
    calls = [{"name": call.name, "arguments": _object(call.arguments)} for call in message.calls]
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
