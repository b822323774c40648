"""Ollama's routes: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from .dialect import Dialect, dumps
from .errors import invalid
from .fields import Body, Methods, Tool
from .reasoning_fields import Effort
from .sampler_fields import WHOLE, Number

_OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta")},
}
_IDLE_OPTIONS = frozenset(
    [
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock"),
        *("low_vram", "numa", "repeat_last_n"),
    ]
)
"""What says how Ollama runs a model, and changes no text here."""


_TOKENS = 128
"""Of a text without a chat template, where the request has no num_predict."""


class OllamaCall(BaseModel):
    """A call that the assistant made."""

    class Function(BaseModel):
        """A function and its arguments."""

        name: StrictStr
        arguments: dict[str, Any] = Field(default_factory=dict)
        index: int | None = None

    function: Function
    id: StrictStr | None = None


class OllamaMessage(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr = ""
    thinking: StrictStr | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: StrictStr | None = None


class OllamaRequest(Body):
    """What both kinds of request take.

    Attributes:
        format: "json", or a JSON schema.
        options: Settings of the sampler.
        think: Whether the model reasons first, where its template has a switch for that, or how much.
        decodery: Methods, as in chats.
    """

    model_config = ConfigDict(populate_by_name=True)

    model: StrictStr
    stream: StrictBool | None = None
    format: dict[str, Any] | Literal["json", ""] | None = None
    options: dict[str, Any] | None = None
    keep_alive: StrictStr | Number | None = None
    think: StrictBool | Effort | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=0), WHOLE] | None = None
    decodery: Methods | None = None


class OllamaChatRequest(OllamaRequest):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """`POST /api/generate`.

    Attributes:
        raw: Take the prompt as it is, without the chat template.
    """

    prompt: StrictStr
    system: StrictStr | None = None
    raw: StrictBool | None = None
    suffix: StrictStr | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None


class ShowRequest(Body):
    """`POST /api/show`."""

    model: StrictStr | None = None
    name: StrictStr | None = None
    verbose: StrictBool | None = None


def as_chat(body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """The same request as a chat completion; one with `raw` or a suffix as a plain completion.

    Raises:
        ApiError: For an option that is not known.
    """
    found: dict[str, Any] = {"model": body.model.removesuffix(":latest"), "stream": body.stream is not False}
    for name, value in (body.options or {}).items():
        if name not in _OPTIONS.keys() | _IDLE_OPTIONS:
            raise invalid(
                f"there is no option {name[:80]!r}: allowed are {', '.join(_OPTIONS)}", f"options.{name[:80]}"
            )
        if name in _OPTIONS:
            found[_OPTIONS[name]] = None if name == "num_predict" and value == -2 else value
    if found["stream"]:
        found["stream_options"] = {"include_usage": True}
    if body.decodery is not None:
        found["decodery"] = body.decodery.model_dump(exclude_none=True)
    if body.format:
        found["structured_outputs"] = {"json_object": True} if body.format == "json" else {"json": body.format}
    if isinstance(body, OllamaGenerateRequest) and (body.raw or body.suffix):
        return {"max_tokens": _TOKENS, **found, "prompt": body.prompt, "suffix": body.suffix}
    if isinstance(body.think, str):
        found["reasoning_effort"] = body.think
    elif body.think is not None:
        found["thinking"] = {"type": "enabled" if body.think else "disabled"}
    if isinstance(body, OllamaGenerateRequest):
        head = [{"role": "system", "content": body.system}] if body.system else []
        return {**found, "messages": [*head, {"role": "user", "content": body.prompt}]}
    found["messages"] = [_message(each) for each in body.messages]
    if body.tools:
        found["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return found


def _message(message: OllamaMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = [call.function for call in message.tool_calls]
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for call in calls
        ]
    if message.tool_name is not None:
        found["name"] = message.tool_name
    return found


class Ollama(Dialect):
    """Answers as lines of JSON.

    Args:
        chat: Whether it answers a chat.
    """

    media_type = "application/x-ndjson"

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        message = choice.get("message") or {"content": choice.get("text")}
        return self._line(answer, message, choice, answer["usage"])

    async def stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        head, last, usage = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        async for chunk in chunks:
            if "error" in chunk:
                yield dumps({"error": chunk["error"]["message"]}) + b"\n"
                return
            head, usage = chunk, chunk.get("usage") or usage
            for choice in chunk["choices"]:
                last = choice if choice.get("finish_reason") else last
                delta = choice.get("delta") or {"content": choice.get("text")}
                if delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"):
                    yield dumps(self._line(head, delta, None, None)) + b"\n"
        yield dumps(self._line(head, {}, last, usage)) + b"\n"

    def _line(
        self,
        head: Mapping[str, Any],
        message: Mapping[str, Any],
        choice: Mapping[str, Any] | None,
        usage: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        said = message.get("content") or ""
        created = datetime.fromtimestamp(head["created"], UTC).isoformat().replace("+00:00", "Z")
        found: dict[str, Any] = {"model": head["model"], "created_at": created}
        thought = {"thinking": message["reasoning_content"]} if message.get("reasoning_content") else {}
        if self._chat:
            found["message"] = {"role": "assistant", "content": said, **thought}
            if calls := message.get("tool_calls"):
                found["message"]["tool_calls"] = [_call(call) for call in calls]
        else:
            found |= {"response": said, **thought}
        found["done"] = choice is not None
        if choice is not None and usage is not None:
            found["done_reason"] = "length" if choice.get("finish_reason") == "length" else "stop"
            found |= {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
        return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"function": {"name": function["name"], "arguments": json.loads(function["arguments"])}}
