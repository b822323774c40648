"""What a model thinks is reported apart from its answer, whole and as a stream, in every client's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from decodery.constraints.choice import Choice
from decodery.constraints.reasoning import Reasoning
from decodery.constraints.tool_calls import FunctionCall, ToolCalls
from decodery.llm.llm import LLM
from decodery.models.tokenizers.reasoning import ReasoningMarks, ReasoningSplitter, marks_of
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.server.answer import reasoning_tokens
from decodery.server.anthropic import Anthropic
from decodery.server.ollama import Ollama
from serving import SECONDS, TEMPLATE, TOOLS, client, serving, tiny_lm, user
from tiny_models import make_tokenizer

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


SEVEN: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}
BUDGET = 8


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm(THINKS)


@pytest.fixture(scope="module")
def url(lm: LLM) -> Iterator[str]:
    with serving(lm) as (_, address):
        yield address


def test_budgets_end_the_reasoning_in_every_clients_words(lm: LLM, url: str) -> None:
    """The model's bytes are tokens, and the mark of the end is 8 of them."""
    asked: dict[str, Any] = {"model": "tiny", "messages": user("x"), "temperature": 1.0, "seed": 3}
    sampled = {"temperature": 1.0, "seed": 3}
    expected = lm.chat(user("x"), thinking_token_budget=BUDGET, max_new_tokens=40, **sampled)
    thought = expected.reasoning
    assert expected.text.startswith(f"{thought}</think>") and expected.content
    assert lm.chat(user("x"), max_new_tokens=BUDGET, **sampled).reasoning == thought
    chats = client(url).chat.completions
    whole = chats.create(**asked, max_tokens=40, extra_body={"thinking_token_budget": BUDGET})
    message, usage = whole.choices[0].message, whole.usage
    assert (message.reasoning_content, message.content) == (thought, expected.content)  # type: ignore[attr-defined]
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == BUDGET + len("</think>")
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    budget: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": {"seed": 3}}
    said: dict[str, Any] = {"model": "tiny", "messages": user("x"), "max_tokens": 40}
    plain = lm.chat(user("x"), thinking_token_budget=BUDGET, max_new_tokens=40)
    found = claude.messages.create(**said, **budget)
    blocks = [block.thinking if block.type == "thinking" else block.text for block in found.content]  # type: ignore[union-attr]
    assert blocks == [plain.reasoning, plain.content]
    with claude.messages.stream(**said, **budget) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
    with pytest.raises(anthropic.BadRequestError, match="must be less than max_tokens, and 8 is not less than 8"):
        claude.messages.create(**said | {"max_tokens": BUDGET}, **budget)
    # Efforts are budgets where the chat template knows none: at "none" the part is closed at once.
    for effort, seen in (("none", ""), ("high", lm.chat(user("x"), max_new_tokens=40).reasoning)):
        chat = chats.create(model="tiny", messages=user("x"), max_tokens=40, reasoning_effort=effort)  # type: ignore[call-overload]
        assert getattr(chat.choices[0].message, "reasoning_content", "") == seen
        llama = ollama.Client(url).chat("tiny", user("x"), think=effort, options={"num_predict": 40})  # type: ignore[arg-type]
        assert (llama.message.thinking or "") == seen
    short = lm.chat(user("x"), thinking_token_budget=128, max_new_tokens=200)
    chat = chats.create(model="tiny", messages=user("x"), max_tokens=200, reasoning_effort="minimal")
    assert chat.choices[0].message.reasoning_content == short.reasoning  # type: ignore[attr-defined]


def test_an_answer_follows_its_schema_after_the_reasoning(lm: LLM, url: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": user("x"), "max_tokens": 40, "response_format": SEVEN}
    for body in ({"max_reasoning_tokens": BUDGET}, {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}):
        found = client(url).chat.completions.create(**asked, extra_body=body).choices[0]
        assert found.message.content == "7" and found.finish_reason == "stop"
        assert found.message.reasoning_content  # type: ignore[attr-defined]
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    config: Any = {"format": {"type": "json_schema", "schema": {"enum": [7]}}}
    thinking: Any = {"type": "enabled", "budget_tokens": BUDGET}
    message = claude.messages.create(
        model="tiny", messages=user("x"), max_tokens=40, output_config=config, thinking=thinking
    )
    assert [block.text for block in message.content if block.type == "text"] == ["7"]
    # A model that opens no reasoning part by itself answers from the first token.
    with serving(tiny_lm(TEMPLATE + "{# </think> #}")) as (_, closed):
        found = client(closed).chat.completions.create(**asked).choices[0]
        assert found.message.content == "7" and not hasattr(found.message, "reasoning_content")


def test_no_free_reasoning_stands_before_what_a_server_constrains(lm: LLM) -> None:
    guard = Choice(("yes", "no"))
    for model in (lm, tiny_lm(TEMPLATE + "{# </think> #}")):
        with serving(model, constraint=guard) as (_, url):
            create = partial(client(url).chat.completions.create, model="tiny", messages=user("x"), max_tokens=20)
            found = create()
            message = found.choices[0].message
            assert message.content in guard.options and not hasattr(message, "reasoning_content")
            # Closed at once: no token of it is the client's.
            usage = found.usage
            assert usage is not None and usage.completion_tokens <= len("</think>") + 4
            for asked in (
                {"reasoning_effort": "high"},
                {"thinking_token_budget": 5},
                {"thinking": {"type": "enabled"}},
                {"chat_template_kwargs": {"enable_thinking": True}},
            ):
                with pytest.raises(openai.BadRequestError, match="constrains every text: leave out what asks"):
                    create(extra_body=asked)
            assert create(reasoning_effort="none").choices[0].message.content == message.content


def test_calls_follow_the_reasoning_and_none_begin_in_it(lm: LLM, url: str) -> None:
    output = lm.chat(user("x"), tools=TOOLS, tool_choice="now", thinking_token_budget=BUDGET, max_new_tokens=120)
    assert output.tool_calls == (FunctionCall("now", "{}"),) and output.content == "" and output.reasoning
    body = {"thinking_token_budget": BUDGET}
    asked: dict[str, Any] = {"model": "tiny", "messages": user("x"), "max_tokens": 120, "tools": TOOLS}
    found = client(url).chat.completions.create(**asked, tool_choice="required", extra_body=body).choices[0].message
    assert found.tool_calls and found.reasoning_content == output.reasoning  # type: ignore[attr-defined]
    inside = Reasoning(answer=ToolCalls([{"name": "now"}])).compile(lm.vocabulary)
    state = inside.init(list(b"<think>"))
    for byte in b"so <tool_call>x":
        assert inside.accepts(state, byte)
        state = inside.advance(state, byte)


def test_responses_have_an_item_of_reasoning(lm: LLM, url: str) -> None:
    expected = lm.chat(user("x"), thinking_token_budget=128, max_new_tokens=200)
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": "x",
        "max_output_tokens": 200,
        "reasoning": {"effort": "minimal"},
    }
    api = client(url).responses
    found = api.create(**asked)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert found.output[0].content[0].text == expected.reasoning  # type: ignore[union-attr, index]
    assert found.output_text == expected.content and found.usage is not None
    assert found.usage.output_tokens_details.reasoning_tokens == 128 + len("</think>")
    events = list(api.create(**asked, stream=True))
    kinds = {"response.reasoning_text.delta": expected.reasoning, "response.output_text.delta": expected.content}
    for kind, text in kinds.items():
        assert "".join(event.delta for event in events if event.type == kind) == text
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        "reasoning",
        "message",
    ]
    # What was reasoned is not read again.
    turns = [
        {"role": "user", "content": "x"},
        *[item.model_dump() for item in found.output],
        {"role": "user", "content": "y"},
    ]
    again = api.create(model="tiny", input=turns, max_output_tokens=4, store=False)  # type: ignore[arg-type]
    said = [*user("x"), {"role": "assistant", "content": expected.content}, *user("y")]
    assert again.usage is not None and again.usage.input_tokens == len(lm.encode(said))


def test_marks_that_are_special_tokens_are_seen() -> None:
    backend = make_tokenizer()
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    tokenizer = Tokenizer(backend, eos_ids=(257,))
    ids = tokenizer.encode("[THINK]a[/THINK]b<|im_end|>", special=False)
    assert len(ids) == 5 and tokenizer.decode(ids) == "[THINK]a[/THINK]b"


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


@pytest.mark.parametrize("thought", [0, 1, 55, 56, 57, 63, 64, 65, 200])
def test_tokens_of_reasoning_are_counted_up_to_the_mark_of_its_end(thought: int) -> None:
    tokenizer = tiny_lm(THINKS).tokenizer
    text = f"{'x' * thought}</think>yes" * 2
    for inside, begin in ((True, ""), (False, "<think>"), (False, "no <think>")):
        marks, tokens = ReasoningMarks("<think>", "</think>", inside), tokenizer.encode(begin + text, special=False)
        stream, said = tokenizer.stream(), ""
        expected = 0 if begin.startswith("no") else len(tokens)
        for count, token in enumerate(tokens, start=1):
            said += stream.push([token])
            if "</think>" in said:
                expected = min(expected, count)
        assert reasoning_tokens(tokenizer, tokens, marks) == expected
        cut = tokens[: len(begin) + thought]
        assert reasoning_tokens(tokenizer, cut, marks) == min(expected, len(cut))
