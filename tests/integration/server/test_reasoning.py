"""What a model thinks is reported apart from its answer, whole and as a stream, in every client's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from decodery.server.anthropic import Anthropic
from decodery.server.ollama import Ollama
from decodery.server.reasoning import ReasoningMarks, ReasoningSplitter, marks_of
from serving import SECONDS, TEMPLATE, client, serving, tiny_lm, user

THINKS = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}{# </think> #}")
TEXTS = [
    ("<think>\nso <b> it is\n</think>\n\nYes </think> <think>", False, "so <b> it is\n", "Yes </think> <think>"),
    ("so\n</think>\n\nYes", True, "so\n", "Yes"),
    ("\n <think>a</think>b", False, "a", "b"),
    ("  No <think>thought</think>", False, "", "  No <think>thought</think>"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("<thin", False, "", "<thin"),
    ("", True, "", ""),
]


def split(text: str, cuts: tuple[int, ...], *, inside: bool) -> tuple[str, str]:
    """What all pieces of a text add up to."""
    splitter = ReasoningSplitter(ReasoningMarks("<think>", "</think>", inside))
    pieces = [text[first:last] for first, last in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    found = [splitter.push(each, final=number == len(cuts)) for number, each in enumerate(pieces)]
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


@pytest.mark.parametrize(("text", "inside", "thought", "said"), TEXTS)
def test_a_text_is_split_alike_wherever_its_pieces_end(text: str, inside: bool, thought: str, said: str) -> None:
    assert split(text, (), inside=inside) == (thought, said)
    for first in range(len(text) + 1):
        for last in range(first, len(text) + 1):
            assert split(text, (first, last), inside=inside) == (thought, said)


def test_marks_are_those_of_the_template() -> None:
    assert marks_of(TEMPLATE, "<think>") is None
    assert marks_of("... </think> ...", "assistant\n<think>\n") == ReasoningMarks("<think>", "</think>", True)
    # Who is told not to think has an empty thought in the prompt.
    assert marks_of("... </think> ...", "<think>\n\n</think>\n\n") == ReasoningMarks("<think>", "</think>", False)
    assert marks_of("[THINK]x[/THINK]", "") == ReasoningMarks("[THINK]", "[/THINK]")


def test_a_model_that_thinks_is_reported_to_do_so() -> None:
    lm = tiny_lm(THINKS)
    asked: dict[str, Any] = {"model": "tiny", "messages": user("x"), "max_tokens": 12, "temperature": 1.0, "seed": 3}
    with serving(lm) as (_, url):
        whole = client(url).chat.completions.create(**asked, extra_body={"ignore_eos": True})
        message = whole.choices[0].message
        text: str = message.reasoning_content  # type: ignore[attr-defined]
        assert text and message.content == "" and text == message.reasoning  # type: ignore[attr-defined]
        chunks = client(url).chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == text
        assert not any(delta.content for delta in deltas)
        body = {**asked, "ignore_eos": True, "include_reasoning": False}
        hidden = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SECONDS).json()["choices"][0]["message"]
        assert "reasoning_content" not in hidden and not hidden["content"]
        # Under a schema nothing is thought: the text follows it from its first token.
        body = {
            **asked,
            "max_tokens": 200,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}},
        }
        found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SECONDS).json()["choices"][0]["message"]
        assert found["content"] == "7" and "reasoning_content" not in found


def test_dialects_have_their_own_forms_of_it() -> None:
    head = {"id": "chatcmpl-1", "model": "m", "created": 0}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    deltas = [{"reasoning_content": "so"}, {"content": "Yes"}]
    ended = {"index": 0, "delta": {}, "finish_reason": "stop"}

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        for delta in deltas:
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**head, "choices": [ended], "usage": usage}

    async def sent(dialect: Any) -> list[dict[str, Any]]:
        parts = [part async for part in dialect.stream(chunks())]
        return [
            json.loads(line.removeprefix("data: "))
            for part in parts
            for line in part.decode().split("\n")
            if "{" in line
        ]

    lines = asyncio.run(sent(Ollama(chat=True)))
    assert [line["message"].get("thinking", line["message"]["content"]) for line in lines] == ["so", "Yes", ""]
    events = asyncio.run(sent(Anthropic()))
    assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == [
        "thinking",
        "text",
    ]
    message = {"role": "assistant", "content": "Yes", "reasoning_content": "so"}
    answer = {**head, "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    assert [block["type"] for block in Anthropic().whole(answer)["content"]] == ["thinking", "text"]
    assert Ollama(chat=True).whole(answer)["message"]["thinking"] == "so"
