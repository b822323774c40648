"""Items of a response: messages, calls of tools and what tools answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, StrictStr

from .errors import invalid


class ContentPart(BaseModel):
    """A piece of a message; texts only."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text"]
    text: StrictStr = ""
    refusal: StrictStr = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(BaseModel):
    """A message, a call of a tool, or what a tool answered.

    Attributes:
        type: What it is; a message by default.
        role, content: Of a message.
        call_id, name, arguments: Of a call.
        output: Of a tool.
        summary: Of a model's reasoning, which is not read again.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: StrictStr | None = None
    status: StrictStr | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: StrictStr | list[ContentPart] | None = None
    call_id: StrictStr | None = None
    name: StrictStr | None = None
    arguments: StrictStr = "{}"
    output: StrictStr | list[ContentPart] | None = Field(default=None)
    summary: list[Any] | None = None
    encrypted_content: StrictStr | None = None


def as_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as messages of a chat; calls side by side are one message.

    Raises:
        ApiError: For a message without a role.
    """
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if item.type == "function_call":
            function = {"name": item.name or "", "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if found and found[-1]["role"] == "assistant" and items[number - 1].type == "function_call":
                found[-1]["tool_calls"].append(call)
            else:
                found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.type == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _said(item.output)})
        elif item.type == "message":
            if item.role is None:
                raise invalid("a message has a role: user, assistant, system or developer", f"input.{number}.role")
            found.append({"role": item.role, "content": _said(item.content)})
    return found


def _said(content: str | list[ContentPart] | None) -> str:
    return "".join(part.text or part.refusal for part in content) if isinstance(content, list) else content or ""


def message_item(name: str, said: str, *, cut: bool) -> dict[str, Any]:
    """What the model wrote.

    Args:
        name: The response's.
        said: The text.
        cut: Whether it ended before its end.
    """
    part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
    status = "incomplete" if cut else "completed"
    return {"id": f"msg_{name}", "type": "message", "status": status, "role": "assistant", "content": [part]}


def reasoning_item(name: str, thought: str) -> dict[str, Any]:
    """What the model reasoned first."""
    part = {"type": "reasoning_text", "text": thought}
    return {"id": f"rs_{name}", "type": "reasoning", "status": "completed", "summary": [], "content": [part]}


def call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool."""
    item = {"id": f"fc_{call['id'].removeprefix('call_')}", "type": "function_call", "status": "completed"}
    return {**item, "call_id": call["id"], **call["function"]}


def messages_of(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output of a response as messages, for the requests that go on with it."""
    return as_messages([Item.model_validate(item) for item in output])
