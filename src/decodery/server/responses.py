"""`/v1/responses`: OpenAI's newer form of a chat, kept so that a later request goes on with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictBool, StrictStr

from .dialect import Dialect, dumps
from .errors import ApiError, invalid
from .fields import Body, Methods
from .reasoning_fields import Effort
from .response_events import STREAMED, Events, text_item
from .response_items import Item, as_messages, call_item, message_item, reasoning_item
from .sampler_fields import WHOLE, Number, Share

_MOST_KEPT, _MOST_BYTES = 1024, 64 << 20
"""Responses that are kept of all clients, and bytes of their conversations."""


class TextFormat(BaseModel):
    """What the answer is: text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(BaseModel):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: StrictStr | None = None


class ResponseTool(BaseModel):
    """A function that may be called; tools that OpenAI runs itself are refused."""

    type: Literal["function"]
    name: StrictStr
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class NamedTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"]
    name: StrictStr

    @property
    def in_chats(self) -> dict[str, Any]:
        """The same in a chat."""
        return {"type": "function", "function": {"name": self.name}}


class SomeTools(BaseModel):
    """The tools that may be called, and whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]

    @property
    def in_chats(self) -> dict[str, Any]:
        """The same in a chat."""
        allowed = {"mode": self.mode, "tools": [each.in_chats for each in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class ReasoningOptions(BaseModel):
    """How much the model reasons first.

    Attributes:
        summary, generate_summary: No summary is written here; the reasoning itself is returned.
    """

    effort: Effort | None = None
    summary: StrictStr | None = None
    generate_summary: StrictStr | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`.

    Attributes:
        input: A text, or the turns of a conversation.
        instructions: The system message.
        previous_response_id: The response that the conversation goes on with.
        store: Whether the response is kept for later requests; it is by default.
        decodery: Methods, as in chats.
    """

    model: StrictStr | None = None
    input: StrictStr | Annotated[list[Item], Field(min_length=1)]
    instructions: StrictStr | None = None
    previous_response_id: StrictStr | None = None
    store: StrictBool | None = None
    stream: StrictBool | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1), WHOLE] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | SomeTools | None = None
    parallel_tool_calls: StrictBool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[StrictStr] | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    decodery: Methods | None = None


class Kept:
    """Conversations of earlier responses, by owner and id.

    The oldest of the owner with most of them go first. They are kept as JSON: as objects they would take up to thirty
    times the bytes that are counted.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        self._counts, self._bytes = Counter[str](), Counter[str]()

    def put(self, owner: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response, and the conversation up to its end."""
        self._kept[owner, response["id"]] = kept = dumps(response), dumps(messages)
        self._counts[owner] += 1
        self._bytes[owner] += _size(kept)
        while (many := len(self._kept) > _MOST_KEPT) or self._bytes.total() > _MOST_BYTES:
            ((most, _),) = (self._counts if many else self._bytes).most_common(1)
            self.drop(most, next(name for each, name in self._kept if each == most))

    def response(self, owner: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._find(owner, name)[0])
        return found

    def messages(self, owner: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._find(owner, name)[1])
        return found

    def drop(self, owner: str, name: str) -> None:
        self._bytes[owner] -= _size(self._find(owner, name))
        self._counts[owner] -= 1
        del self._kept[owner, name]

    def _find(self, owner: str, name: str) -> tuple[bytes, bytes]:
        found = self._kept.get((owner, name))
        if found is None:
            raise ApiError(404, f"there is no response {name[:100]!r} here: it was never stored, or is gone by now")
        return found


def _size(kept: tuple[bytes, bytes]) -> int:
    return sum(map(len, kept))


def as_chat(body: ResponsesRequest, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """The same request as a chat completion.

    Args:
        body: The request.
        earlier: The conversation that it goes on with.
    """
    if "message.output_text.logprobs" in (body.include or ()):
        raise invalid("a response reports no log-probabilities: use /v1/chat/completions with logprobs", "include")
    head = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    found: dict[str, Any] = {"model": body.model, "messages": [*head, *earlier, *as_messages(items)]}
    found |= {name: getattr(body, name) for name in ("temperature", "top_p", "stream", "parallel_tool_calls")}
    found["max_completion_tokens"] = body.max_output_tokens
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        found["response_format"] = _format(body.text.format)
    if body.tools:
        found["tools"] = [_tool(each) for each in body.tools]
    choice = body.tool_choice
    found["tool_choice"] = choice if choice is None or isinstance(choice, str) else choice.in_chats
    found["reasoning_effort"] = None if body.reasoning is None else body.reasoning.effort
    found["stream_options"] = {"include_usage": True} if body.stream else None
    found["decodery"] = None if body.decodery is None else body.decodery.model_dump(exclude_none=True)
    return {name: value for name, value in found.items() if value is not None}


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema_ is None:
        raise invalid("text.format: schema is missing", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
    return {"type": "function", "function": function}


class Responses(Dialect):
    """Answers as responses of output items.

    Args:
        body: The request.
        keep: Called with the finished response.
    """

    def __init__(self, body: ResponsesRequest, keep: Callable[[dict[str, Any]], None]) -> None:
        self._body, self._keep = body, keep

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        name, said = answer["id"].removeprefix("chatcmpl-"), choice["message"]["content"]
        calls = choice["message"].get("tool_calls") or ()
        cut = choice["finish_reason"] in ("length", "cancelled")
        thought = choice["message"].get("reasoning_content")
        output = [reasoning_item(name, thought)] if thought else []
        output += [message_item(name, said, cut=cut)] if said or not calls else []
        output += [call_item(call) for call in calls]
        return self._finished(answer, output, choice, answer["usage"])

    async def stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        events = Events()
        output: list[dict[str, Any]] = []
        opened, said, last, usage, head = "", "", dict[str, Any](), dict[str, Any](), dict[str, Any]()
        async for chunk in chunks:
            if "error" in chunk:
                yield events.of("error", {**chunk["error"], "param": None})
                return
            if not head:
                head = chunk
                for state in ("created", "in_progress"):
                    yield events.of(f"response.{state}", {"response": self._response(head, [], "in_progress", None)})
            usage = chunk.get("usage") or usage
            name = head["id"].removeprefix("chatcmpl-")
            for choice in chunk["choices"]:
                last = choice if choice.get("finish_reason") else last
                delta = choice["delta"]
                texts = {kind: delta.get(field) for kind, field in STREAMED.items()}
                calls, reason = delta.get("tool_calls") or (), choice.get("finish_reason")
                for kind, text in [*texts.items(), ("", "")]:
                    # A text ends where one of the other kind begins, at a call, and at the end.
                    if opened and kind != opened and (text or (not kind and (calls or reason))):
                        item = text_item(opened, name, said, cut=reason == "length")
                        for part in events.close_text(opened, item, len(output)):
                            yield part
                        output.append(item)
                        opened, said = "", ""
                    if not text:
                        continue
                    if not opened:
                        opened = kind
                        for part in events.open_text(kind, text_item(kind, name, "", cut=False), len(output)):
                            yield part
                    said += text
                    yield events.text(kind, text_item(kind, name, "", cut=False), len(output), text)
                for call in calls:
                    item = call_item(call)
                    for part in events.call(item, len(output)):
                        yield part
                    output.append(item)
        response = self._finished(head, output, last, usage)
        yield events.of(f"response.{response['status']}", {"response": response})

    def _finished(
        self, head: Mapping[str, Any], output: list[Any], choice: Mapping[str, Any], usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter", "cancelled": "max_output_tokens"}
        reason = reasons.get(choice.get("finish_reason", ""))
        found = self._response(head, output, "incomplete" if reason else "completed", usage)
        found["incomplete_details"] = {"reason": reason} if reason else None
        self._keep(found)
        return found

    def _response(
        self, head: Mapping[str, Any], output: list[Any], status: str, usage: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        body = self._body
        asked = body.model_dump(mode="json", by_alias=True, exclude={"input", "stream", "decodery"})
        return {
            **asked,
            "id": f"resp_{head['id'].removeprefix('chatcmpl-')}",
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if not usage else _usage(usage),
            "store": body.store is not False,
            "tools": asked["tools"] or [],
            "tool_choice": asked["tool_choice"] or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "metadata": body.metadata or {},
            "text": asked["text"] or {"format": {"type": "text"}},
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
