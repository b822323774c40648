"""Other services' forms of a chat, each asked by its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
import torch
from openai import OpenAI

from decodery.llm.llm import LLM
from decodery.models.batch import Batch, Segment
from serving import KNOWS_TOOLS, TOOLS, serving, tiny_lm, user

NOW = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def lm() -> LLM:
    return tiny_lm(KNOWS_TOOLS)


@pytest.fixture(scope="module")
def url(lm: LLM) -> Iterator[str]:
    with serving(lm, keys={"secret": "a", "other": "b"}) as (_, address):
        yield address


@pytest.fixture(scope="module")
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def api(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def llama(url: str) -> ollama.Client:
    return ollama.Client(host=url, headers={"Authorization": "Bearer secret"})


def test_anthropics_client_gets_what_the_library_writes(lm: LLM, claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": user("tides"), "system": "Be brief."}
    expected = lm.chat([{"role": "system", "content": "Be brief."}, *user("tides")], max_new_tokens=40)
    found = claude.messages.create(**asked)
    assert [block.text for block in found.content if block.type == "text"] == [expected.text]
    assert found.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    assert found.usage.input_tokens == len(expected.prompt_tokens)
    assert found.usage.output_tokens == len(expected.tokens)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().usage.output_tokens == len(expected.tokens)
    counted = claude.messages.count_tokens(model="tiny", messages=user("tides"), system="Be brief.")
    assert counted.input_tokens == len(expected.prompt_tokens)


def test_anthropics_stops_beginnings_and_errors(lm: LLM, url: str, claude: anthropic.Anthropic) -> None:
    begun = [*user("tides"), {"role": "assistant", "content": "The moon"}]
    expected = lm.chat(begun, continue_final_message=True, max_new_tokens=30).text
    found = claude.messages.create(model="tiny", max_tokens=30, messages=begun)  # type: ignore[arg-type]
    assert [block.text for block in found.content if block.type == "text"] == [expected]
    stop = expected[8:10]
    cut = claude.messages.create(model="tiny", max_tokens=30, messages=begun, stop_sequences=[stop])  # type: ignore[arg-type]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        claude.messages.create(model="claude", max_tokens=3, messages=user("x"))  # type: ignore[arg-type]
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(
            model="tiny",
            max_tokens=3,
            messages=user("x"),  # type: ignore[arg-type]
        )
    error = httpx.post(f"{url}/v1/messages", json={"max_tokens": 0}, headers={"x-api-key": "secret"}).json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"


def test_anthropics_tools(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 250, "messages": user("now?"), "tools": [NOW]}
    asked["tool_choice"] = {"type": "tool", "name": "now"}
    found = claude.messages.create(**asked)
    (use,) = [block for block in found.content if block.type == "tool_use"]
    assert found.stop_reason == "tool_use" and (use.name, use.input) == ("now", {})
    with claude.messages.stream(**asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert (streamed.name, streamed.input) == ("now", {})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "12"}]}
    turns = [*user("now?"), {"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**asked | {"messages": turns, "tool_choice": {"type": "none"}}).content


def test_responses_are_chats_that_go_on(lm: LLM, api: OpenAI, url: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 40}
    system = {"role": "system", "content": "Be brief."}
    expected = lm.chat([system, *user("tides")], max_new_tokens=40)
    first = api.responses.create(input="tides", **asked)
    assert first.output_text == expected.text and first.usage is not None
    assert first.usage.output_tokens == len(expected.tokens)
    assert first.status == {"stop": "completed", "length": "incomplete"}[expected.finish_reason]
    events = list(api.responses.create(input="tides", stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete") and last.response.output_text == expected.text
    second = api.responses.create(input="more", previous_response_id=first.id, **asked)
    said = [system, *user("tides"), {"role": "assistant", "content": expected.text}, *user("more")]
    assert second.output_text == lm.chat(said, max_new_tokens=40).text
    assert api.responses.retrieve(first.id).output_text == expected.text
    with pytest.raises(openai.NotFoundError):
        OpenAI(base_url=f"{url}/v1", api_key="other").responses.retrieve(first.id)
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        api.responses.create(input="more", previous_response_id=first.id, **asked)
    unkept = api.responses.create(input="tides", store=False, **asked)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(unkept.id)


def test_responses_with_tools_and_formats(api: OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 250, "input": user("now?")}
    named: Any = {"type": "function", "name": "now"}
    found = api.responses.create(**asked, tools=tools, tool_choice=named)
    (call,) = found.output
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("now", {})
    events = list(api.responses.create(**asked, tools=tools, tool_choice=named, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{}]
    turns = [
        *asked["input"],
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12"},
    ]
    assert api.responses.create(**asked | {"input": turns}, tools=tools, tool_choice="none").output
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    text: Any = {"format": {"type": "json_schema", "name": "mood", "schema": schema}}
    assert json.loads(api.responses.create(**asked, text=text).output_text)["mood"] in ("good", "bad")
    with pytest.raises(openai.BadRequestError, match=r"tools\.0\.type"):
        api.responses.create(**asked, tools=[{"type": "web_search"}])


def test_ollamas_client(lm: LLM, llama: ollama.Client) -> None:
    expected = lm.chat(user("tides"), max_new_tokens=30, temperature=0.9, seed=4)
    options = {"num_predict": 30, "temperature": 0.9, "seed": 4, "num_ctx": 2048}
    found = llama.chat(model="tiny", messages=user("tides"), options=options)
    assert found.message.content == expected.text and found.eval_count == len(expected.tokens)
    parts = list(llama.chat(model="tiny:latest", messages=user("tides"), options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == expected.text and parts[-1].done
    assert llama.generate(model="tiny", prompt="tides", options=options).response == expected.text
    raw = lm.generate("tides", apply_chat_template=False, max_new_tokens=30, temperature=0.9, seed=4)
    assert llama.generate(model="tiny", prompt="tides", raw=True, options=options).response == raw.text
    assert [model.model for model in llama.list().models] == ["tiny"]
    assert llama.show("tiny").template == KNOWS_TOOLS
    choice = llama.chat(model="tiny", messages=user("?"), format={"enum": [1, 2]}, options={"num_predict": 9})
    assert choice.message.content in ("1", "2")
    with pytest.raises(ollama.ResponseError, match="no option 'heat'"):
        llama.chat(model="tiny", messages=user("x"), options={"heat": 3})
    with pytest.raises(ollama.ResponseError, match="no model"):
        llama.chat(model="llama3", messages=user("x"))


def test_embeddings_are_the_states_of_the_last_layer(lm: LLM, api: OpenAI) -> None:
    texts = ["tides", "the moon and " * 20]
    found = api.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for text, each in zip(texts, found.data, strict=True):
        batch = Batch([Segment.chunk(lm.tokenizer.encode(text), lm.model.new_cache())])
        states = lm.model.final_norm(lm.model.forward(batch, taps=[-1]).hidden[-1]).double()
        mean = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
        assert torch.allclose(torch.tensor(each.embedding, dtype=torch.float64), mean, atol=1e-9)
    packed = api.embeddings.create(model="tiny", input=texts[0])
    assert torch.allclose(torch.tensor(packed.data[0].embedding), torch.tensor(found.data[0].embedding), atol=1e-6)
    short = api.embeddings.create(model="tiny", input=texts[0], dimensions=4, extra_body={"pooling": "last"})
    assert len(short.data[0].embedding) == 4
    assert sum(x * x for x in short.data[0].embedding) == pytest.approx(1, abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        api.embeddings.create(model="tiny", input="x", dimensions=9999)
    with pytest.raises(openai.BadRequestError, match="context length"):
        api.embeddings.create(model="tiny", input="x" * 3000)
