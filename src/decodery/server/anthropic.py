"""`/v1/messages`: Anthropic's form of a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from .dialect import Dialect, event
from .errors import ApiError, invalid
from .fields import Body, Methods
from .reasoning_fields import Effort, Thinking
from .sampler_fields import WHOLE, Number, Share

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class Block(BaseModel):
    """A piece of a message: a text, a call of a tool, or what a tool answered.

    Attributes:
        type: What it is.
        text: A text.
        id, name, input: Of a call.
        tool_use_id, content: Of what a tool answered.
        thinking: What a model thought, which is not read again.
    """

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: StrictStr = ""
    id: StrictStr | None = None
    name: StrictStr = ""
    input: dict[str, Any] | None = None
    tool_use_id: StrictStr | None = None
    content: StrictStr | list[Block] | None = None
    is_error: StrictBool | None = None
    thinking: StrictStr | None = None
    signature: StrictStr | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def said(self) -> str:
        """All text in it."""
        inner = self.content
        return self.text if inner is None else inner if isinstance(inner, str) else "".join(each.said for each in inner)


class Turn(BaseModel):
    """A turn of a conversation."""

    role: Literal["user", "assistant"]
    content: StrictStr | list[Block]


class ToolUse(BaseModel):
    """A tool that may be called."""

    type: Literal["custom"] | None = None
    name: StrictStr
    description: StrictStr | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    """What is said about calling tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class OutputFormat(BaseModel):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """How the model answers.

    Attributes:
        effort: How much it reasons first.
        format: What the answer follows.
    """

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    model: StrictStr | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: StrictStr | list[Block] | None = None
    tools: Annotated[list[ToolUse], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`.

    Attributes:
        decodery: Methods, as in chats.
    """

    max_tokens: Annotated[int, Field(strict=True, ge=1), WHOLE]
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(strict=True, ge=0), WHOLE] | None = None
    stop_sequences: Annotated[list[StrictStr], Field(max_length=16)] | None = None
    stream: StrictBool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    decodery: Methods | None = None


def as_chat(body: CountRequest) -> dict[str, Any]:
    """The same request as a chat completion.

    Raises:
        ApiError: For what a chat cannot say.
    """
    found: dict[str, Any] = {"messages": _messages(body), "model": body.model}
    if body.tools:
        found["tools"] = [_tool(each) for each in body.tools]
    if body.tool_choice is not None:
        found |= _choice(body.tool_choice)
    if body.thinking is not None:
        found["thinking"] = body.thinking.model_dump(exclude_none=True)
    if body.output_config is not None:
        found["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = {"schema": body.output_config.format.schema_}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        budget = None if body.thinking is None else body.thinking.budget_tokens
        if budget is not None and budget >= body.max_tokens:
            raise invalid(
                f"thinking.budget_tokens must be less than max_tokens, and {budget} is not less than {body.max_tokens}",
                "thinking.budget_tokens",
            )
        found |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        found |= {"stop": body.stop_sequences, "stream_options": {"include_usage": True} if body.stream else None}
        if body.decodery is not None:
            found["decodery"] = body.decodery.model_dump(exclude_none=True)
        # An assistant's turn at the end is the beginning of the answer.
        found["continue_final_message"] = body.messages[-1].role == "assistant" or None
    return {name: value for name, value in found.items() if value is not None}


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if body.system:
        said = body.system if isinstance(body.system, str) else "".join(each.said for each in body.system)
        found.append({"role": "system", "content": said})
    for turn in body.messages:
        blocks = [Block(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        results = [block for block in blocks if block.type == "tool_result"]
        found += [{"role": "tool", "tool_call_id": each.tool_use_id, "content": each.said} for each in results]
        said = "".join(block.text for block in blocks if block.type == "text")
        calls = [_call(block) for block in blocks if block.type == "tool_use"]
        if said or calls or not results:
            found.append({"role": turn.role, "content": said, **({"tool_calls": calls} if calls else {})})
    return found


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: ToolUse) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    found: dict[str, Any] = {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.type == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def error(found: ApiError | Mapping[str, Any], status: int = 500) -> dict[str, Any]:
    """An error in this form."""
    message = found.message if isinstance(found, ApiError) else found["message"]
    kind = _KINDS.get(found.status if isinstance(found, ApiError) else status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class Anthropic(Dialect):
    """Answers as messages of content blocks."""

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        said, calls = choice["message"]["content"], choice["message"].get("tool_calls") or ()
        thought = choice["message"].get("reasoning_content")
        content = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        content += [{"type": "text", "text": said}] if said or not calls else []
        content += [_use(call, json.loads(call["function"]["arguments"])) for call in calls]
        return _message(answer, content, choice, answer["usage"])

    async def stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        opened, block, begun, last = "", -1, False, dict[str, Any]()
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        async for chunk in chunks:
            if "error" in chunk:
                yield event(error(chunk["error"]), "error")
                return
            if not begun:
                begun = True
                yield event({"type": "message_start", "message": _message(chunk, [], {}, usage)}, "message_start")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                last = choice if choice.get("finish_reason") else last
                delta = choice["delta"]
                for kind, name in (("thinking", "reasoning_content"), ("text", "content")):
                    if not (said := delta.get(name)):
                        continue
                    if opened and opened != kind:
                        yield _end(block)
                    if opened != kind:
                        opened, block = kind, block + 1
                        yield _begin(block, {"type": kind, kind: ""})
                    yield _delta(block, {"type": f"{kind}_delta", kind: said})
                for call in delta.get("tool_calls") or ():
                    if opened:
                        opened = ""
                        yield _end(block)
                    block += 1
                    yield _begin(block, _use(call, {}))
                    arguments = call["function"]["arguments"]
                    yield _delta(block, {"type": "input_json_delta", "partial_json": arguments})
                    yield _end(block)
        if opened:
            yield _end(block)
        found = _message({"id": "", "model": ""}, [], last, usage)
        delta = {name: found[name] for name in ("stop_reason", "stop_sequence")}
        yield event({"type": "message_delta", "delta": delta, "usage": found["usage"]}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")


def _begin(number: int, block: dict[str, Any]) -> bytes:
    return event({"type": "content_block_start", "index": number, "content_block": block}, "content_block_start")


def _delta(number: int, delta: dict[str, Any]) -> bytes:
    return event({"type": "content_block_delta", "index": number, "delta": delta}, "content_block_delta")


def _end(number: int) -> bytes:
    return event({"type": "content_block_stop", "index": number}, "content_block_stop")


def _use(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def _message(
    answer: Mapping[str, Any], content: Sequence[Any], choice: Mapping[str, Any], usage: Mapping[str, Any]
) -> dict[str, Any]:
    stopped = choice.get("stop_reason")
    reason = "stop_sequence" if stopped is not None else _REASONS.get(choice.get("finish_reason") or "")
    return {
        "id": f"msg_{answer['id'].removeprefix('chatcmpl-') or uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": list(content),
        "stop_reason": reason,
        "stop_sequence": None if stopped is None else str(stopped),
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }
