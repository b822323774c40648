"""The events of a streamed response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dialect import event
from .response_items import message_item, reasoning_item

STREAMED = {"reasoning_text": "reasoning_content", "output_text": "content"}
"""Kinds of text in a stream, and what a chat's chunks call them."""


def text_item(kind: str, name: str, said: str, *, cut: bool) -> dict[str, Any]:
    """An item that holds a text of this kind."""
    return reasoning_item(name, said) if kind == "reasoning_text" else message_item(name, said, cut=cut)


def _place(item: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {"output_index": index, "item_id": item["id"], "content_index": 0}


class Events:
    """The events of one stream, which are counted."""

    def __init__(self) -> None:
        self._number = 0

    def of(self, kind: str, content: Mapping[str, Any]) -> bytes:
        found = event({"type": kind, "sequence_number": self._number, **content}, kind)
        self._number += 1
        return found

    def open_text(self, kind: str, item: Mapping[str, Any], index: int) -> list[bytes]:
        begun = {**item, "status": "in_progress", "content": []}
        (part,) = item["content"]
        return [
            self.of("response.output_item.added", {"output_index": index, "item": begun}),
            self.of("response.content_part.added", {**_place(item, index), "part": part}),
        ]

    def text(self, kind: str, item: Mapping[str, Any], index: int, delta: str) -> bytes:
        return self.of(f"response.{kind}.delta", {**_place(item, index), "delta": delta, "logprobs": []})

    def close_text(self, kind: str, item: Mapping[str, Any], index: int) -> list[bytes]:
        place, (part,) = _place(item, index), item["content"]
        return [
            self.of(f"response.{kind}.done", {**place, "text": part["text"], "logprobs": []}),
            self.of("response.content_part.done", {**place, "part": part}),
            self.of("response.output_item.done", {"output_index": index, "item": item}),
        ]

    def call(self, item: Mapping[str, Any], index: int) -> list[bytes]:
        place, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        done = {**place, "arguments": arguments, "name": item["name"]}
        return [
            self.of("response.output_item.added", {"output_index": index, "item": begun}),
            self.of("response.function_call_arguments.delta", {**place, "delta": arguments}),
            self.of("response.function_call_arguments.done", done),
            self.of("response.output_item.done", {"output_index": index, "item": item}),
        ]
