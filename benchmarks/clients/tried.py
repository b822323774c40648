"""What one client does with a server, run by an interpreter that has the client: prints JSON.

python benchmarks/clients/tried.py CLIENT URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ASKED = "What is the capital of France? One word."
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "country": {"type": "string", "maxLength": 12}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
TOOL: Any = {"type": "function", "function": WEATHER}
LONG = "word " * 20_000
USER: Any = [{"role": "user", "content": ASKED}]
Trial = tuple[str, str, Callable[[], Any]]
"""The endpoint, what is tried, and the call; what it returns must be true."""


def joined(pieces: Iterator[str | None]) -> str:
    return "".join(piece or "" for piece in pieces)


def refused(kind: type[Exception], call: Callable[[], Any]) -> bool:
    """Whether a call ends with an error of this kind."""
    try:
        call()
    except kind:
        return True
    return False


def openai(url: str, model: str) -> list[Trial]:
    import openai as sdk
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        country: str

    api = sdk.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    chat: Any = {"model": model, "messages": USER, "max_tokens": 24}
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}

    def stream() -> bool:
        chunks = api.chat.completions.create(**chat, stream=True)
        return joined(chunk.choices[0].delta.content for chunk in chunks) == said(api.chat.completions.create(**chat))

    def said(answer: Any) -> str:
        return answer.choices[0].message.content

    def responses() -> bool:
        first = api.responses.create(model=model, input=ASKED, max_output_tokens=16)
        events = api.responses.create(model=model, input=ASKED, max_output_tokens=16, stream=True)
        streamed = joined(event.delta for event in events if event.type == "response.output_text.delta")
        more = api.responses.create(model=model, input="Why?", previous_response_id=first.id, max_output_tokens=8)
        return first.output_text == streamed and bool(more.output_text)

    return [
        ("/v1/models", "list", lambda: [each.id for each in api.models.list()] == [model]),
        ("/v1/chat/completions", "text", lambda: said(api.chat.completions.create(**chat))),
        ("/v1/chat/completions", "stream equals whole", stream),
        ("/v1/chat/completions", "response_format", lambda: json.loads(
            said(api.chat.completions.create(**chat | {"max_tokens": 60}, response_format=form)))["city"]),
        ("/v1/chat/completions", "parse a class", lambda: api.chat.completions.parse(
            **chat | {"max_tokens": 300, "response_format": City}).choices[0].message.parsed.city is not None),
        ("/v1/chat/completions", "tool call", lambda: json.loads(api.chat.completions.create(
            **chat | {"max_tokens": 80}, tools=[TOOL], tool_choice="required",
        ).choices[0].message.tool_calls[0].function.arguments)["city"]),
        ("/v1/chat/completions", "warning header of unknown fields", lambda: "no_such_field" in
            api.chat.completions.with_raw_response.create(**chat, extra_body={"no_such_field": 1}).headers["warning"]),
        ("/v1/completions", "text, best_of", lambda: api.completions.create(
            model=model, prompt="The tide", best_of=3, temperature=0.8, max_tokens=8).choices[0].text),
        ("/v1/responses", "whole, stream, stored", responses),
        ("/v1/embeddings", "floats", lambda: len(api.embeddings.create(model=model, input="tide").data[0].embedding)),
        ("/v1/chat/completions", "overflow is a BadRequestError", lambda: refused(
            sdk.BadRequestError, lambda: api.chat.completions.create(
                model=model, messages=[{"role": "user", "content": LONG}]))),
    ]  # fmt: skip


def anthropic(url: str, model: str) -> list[Trial]:
    import anthropic as sdk

    api = sdk.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    asked: Any = {"model": model, "max_tokens": 24, "messages": USER}
    tool: Any = {"name": "weather", "description": "The weather.", "input_schema": WEATHER["parameters"]}

    def streamed() -> bool:
        with api.messages.stream(**asked) as stream:
            return stream.get_final_text() == api.messages.create(**asked).content[0].text  # type: ignore[union-attr]

    config: Any = {"format": {"type": "json_schema", "schema": CITY}}
    return [
        ("/v1/messages", "stream equals whole", streamed),
        ("/v1/messages", "tool use", lambda: api.messages.create(
            **asked | {"max_tokens": 80}, tools=[tool], tool_choice={"type": "any"}).stop_reason == "tool_use"),
        ("/v1/messages", "output_config.format", lambda: json.loads(api.messages.create(
            **asked | {"max_tokens": 60}, output_config=config).content[0].text)),  # type: ignore[union-attr]
        ("/v1/messages/count_tokens", "count", lambda: api.messages.count_tokens(
            model=model, messages=USER).input_tokens),
        ("/v1/messages", "no such model is a NotFoundError", lambda: refused(
            sdk.NotFoundError, lambda: api.messages.create(**asked | {"model": "claude"}))),
    ]  # fmt: skip


def ollama(url: str, model: str) -> list[Trial]:
    import ollama as sdk

    api, few = sdk.Client(url, timeout=120), {"num_predict": 16}
    return [
        ("/api/tags", "list", lambda: [each.model for each in api.list().models] == [model]),
        ("/api/show", "show", lambda: api.show(model).capabilities),
        ("/api/chat", "stream equals whole", lambda: joined(part.message.content for part in api.chat(
            model, USER, options=few, stream=True)) == api.chat(model, USER, options=few).message.content),
        ("/api/chat", "format", lambda: json.loads(
            api.chat(model, USER, format=CITY, options={"num_predict": 60}).message.content or "")),
        ("/api/chat", "tools", lambda: api.chat(model, USER, tools=[TOOL], options=few).message is not None),
        ("/api/generate", "text", lambda: api.generate(model, ASKED, options=few).response),
    ]  # fmt: skip


def langchain(url: str, model: str) -> list[Trial]:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        country: str

    own: Any = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**own, temperature=0, max_completion_tokens=24)
    wide = ChatOpenAI(**own, temperature=0, max_completion_tokens=300)
    vectors = OpenAIEmbeddings(**own, check_embedding_ctx_length=False)
    return [
        ("/v1/chat/completions", "invoke equals stream", lambda: chat.invoke(ASKED).content == joined(
            part.content for part in chat.stream(ASKED))),
        ("/v1/chat/completions", "with_structured_output", lambda: wide.with_structured_output(
            City, method="json_schema").invoke(ASKED).city is not None),
        ("/v1/chat/completions", "bind_tools", lambda: wide.bind_tools(
            [TOOL], tool_choice="any").invoke(ASKED).tool_calls[0]["name"] == "weather"),
        ("/v1/completions", "invoke", lambda: OpenAI(**own, max_tokens=8).invoke("The tide")),
        ("/v1/embeddings", "embed_query", lambda: len(vectors.embed_query("tide"))),
        ("/v1/responses", "use_responses_api", lambda: ChatOpenAI(
            **own, use_responses_api=True, max_completion_tokens=24).invoke(ASKED).text),
    ]  # fmt: skip


def cohere(url: str, model: str) -> list[Trial]:
    import cohere as sdk

    asked: Any = {"model": model, "query": "When is high tide?", "documents": ["Bread is baked.", "Twice a day."]}
    first, second = (kind(api_key="none", base_url=url) for kind in (sdk.Client, sdk.ClientV2))
    ranked = [first.rerank(**asked).results, second.rerank(**asked).results]
    return [
        ("/v1/rerank", "Client", lambda: len(ranked[0]) == 2 and ranked[0][0].document.text in asked["documents"]),
        ("/v2/rerank", "ClientV2", lambda: [each.index for each in ranked[1]] == [each.index for each in ranked[0]]),
        ("/v2/rerank", "top_n", lambda: len(second.rerank(**asked, top_n=1).results) == 1),
    ]


def litellm(url: str, model: str) -> list[Trial]:
    import litellm as sdk

    sdk.suppress_debug_info = True
    own: Any = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    chat: Any = {"model": f"openai/{model}", "messages": USER, "max_tokens": 24, **own}

    def said(answer: Any) -> Any:
        return answer.choices[0].message.content

    return [
        ("/v1/chat/completions", "stream equals whole", lambda: said(sdk.completion(**chat)) == joined(
            part.choices[0].delta.content for part in sdk.completion(**chat, stream=True))),
        ("/v1/chat/completions", "overflow is a ContextWindowExceededError", lambda: refused(
            sdk.ContextWindowExceededError,
            lambda: sdk.completion(**chat | {"messages": [{"role": "user", "content": LONG}]}))),
        ("/v1/chat/completions", "hosted_vllm/", lambda: said(sdk.completion(
            **chat | {"model": f"hosted_vllm/{model}"}))),
        ("/v1/messages", "anthropic/", lambda: said(sdk.completion(
            **chat | {"model": f"anthropic/{model}", "api_base": url}))),
        ("/api/chat", "ollama_chat/", lambda: said(sdk.completion(
            **chat | {"model": f"ollama_chat/{model}", "api_base": url}))),
        ("/v1/completions", "text_completion", lambda: sdk.text_completion(
            model=f"text-completion-openai/{model}", prompt="The tide", max_tokens=8, **own).choices[0].text),
        ("/v1/embeddings", "embedding", lambda: len(sdk.embedding(
            model=f"openai/{model}", input=["tide"], **own).data[0]["embedding"])),
        ("/v1/responses", "responses", lambda: sdk.responses(
            model=f"openai/{model}", input=ASKED, max_output_tokens=16, **own).output),
        ("/v1/rerank", "hosted_vllm/", lambda: sdk.rerank(
            model=f"hosted_vllm/{model}", query="high tide", documents=["Twice a day.", "Bread."], api_base=url,
            api_key="none").results[0]["index"] in (0, 1)),
    ]  # fmt: skip


def instructor(url: str, model: str) -> list[Trial]:
    import instructor as sdk
    import openai as api
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        country: str

    def extracted(mode: Any) -> Any:
        client = sdk.from_openai(api.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120), mode=mode)
        return client.chat.completions.create(
            model=model, messages=USER, response_model=City, max_tokens=600, max_retries=0
        ).city is not None  # fmt: skip

    return [
        ("/v1/chat/completions", name, lambda name=name: extracted(getattr(sdk.Mode, name)))
        for name in ("JSON_SCHEMA", "TOOLS")
    ]


def openai_agents(url: str, model: str) -> list[Trial]:
    import agents as sdk
    import openai as api
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        country: str

    @sdk.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"It is sunny in {city}."

    sdk.set_tracing_disabled(True)
    client = api.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    few = sdk.ModelSettings(max_tokens=300, temperature=0)

    def agent(kind: Any, **more: Any) -> Any:
        # This model would call the tool again and again.
        settings = few.resolve(sdk.ModelSettings(tool_choice="none")) if "tools" in more else few
        return sdk.Agent("a", instructions="Be brief.", model=kind(model, client), model_settings=settings, **more)

    def ran(kind: Any, **more: Any) -> Any:
        return sdk.Runner.run_sync(agent(kind, **more), ASKED, max_turns=4).final_output

    def called() -> bool:
        settings = sdk.ModelSettings(max_tokens=300, temperature=0, tool_choice="required")
        made = sdk.Agent("a", model=sdk.OpenAIResponsesModel(model, client), model_settings=settings, tools=[weather],
                         tool_use_behavior="stop_on_first_tool")  # fmt: skip
        return "sunny" in str(sdk.Runner.run_sync(made, "The weather in Paris?").final_output)

    return [
        ("/v1/responses", "run", lambda: ran(sdk.OpenAIResponsesModel)),
        ("/v1/responses", "output_type", lambda: ran(sdk.OpenAIResponsesModel, output_type=City).city is not None),
        ("/v1/responses", "tool", called),
        ("/v1/chat/completions", "run", lambda: ran(sdk.OpenAIChatCompletionsModel)),
        ("/v1/chat/completions", "output_type beside a tool", lambda: ran(
            sdk.OpenAIChatCompletionsModel, output_type=City, tools=[weather]).city is not None),
    ]  # fmt: skip


def pydantic_ai(url: str, model: str) -> list[Trial]:
    import pydantic_ai as sdk
    from pydantic import BaseModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        city: str
        country: str

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    few: Any = {"max_tokens": 300, "temperature": 0.0}

    def ran(kind: Any, **more: Any) -> Any:
        return sdk.Agent(kind(model, provider=provider), model_settings=few, **more).run_sync(ASKED).output

    async def streamed() -> str:
        agent = sdk.Agent(OpenAIChatModel(model, provider=provider), model_settings=few)
        async with agent.run_stream(ASKED) as run:
            return await run.get_output()

    return [
        ("/v1/chat/completions", "run equals run_stream", lambda: ran(OpenAIChatModel) == asyncio.run(streamed())),
        ("/v1/chat/completions", "NativeOutput", lambda: ran(OpenAIChatModel, output_type=sdk.NativeOutput(City))),
        ("/v1/chat/completions", "ToolOutput", lambda: ran(OpenAIChatModel, output_type=sdk.ToolOutput(City))),
        ("/v1/responses", "run", lambda: ran(OpenAIResponsesModel)),
    ]


def llm(url: str, model: str) -> list[Trial]:
    folder = tempfile.mkdtemp()
    lines = ["- model_id: here", f"  model_name: {model}", f"  api_base: {url}/v1", "  supports_schema: true"]
    Path(folder, "extra-openai-models.yaml").write_text("\n".join(lines))
    own = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def ran(*more: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "here", "--no-log", ASKED, *more]
        return subprocess.run(command, env=own, capture_output=True, text=True, check=True, timeout=240).stdout

    return [
        ("/v1/chat/completions", "prompt", lambda: ran("-o", "max_tokens", "24")),
        ("/v1/chat/completions", "--schema", lambda: json.loads(ran("--schema", "city, country"))["city"] is not None),
    ]


PACKAGES = {"langchain": "langchain-openai", "openai_agents": "openai-agents", "pydantic_ai": "pydantic-ai-slim"}
CLIENTS = {each.__name__: each for each in (
    openai, anthropic, ollama, cohere, langchain, litellm, instructor, openai_agents, pydantic_ai, llm,
)}  # fmt: skip


def main() -> None:
    name, url, model = sys.argv[1:]
    rows = []
    for endpoint, tried, call in CLIENTS[name](url, model):
        try:
            fault = "" if call() else "an empty answer, or not the expected one"
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:300]
        rows.append({"endpoint": endpoint, "tried": tried, "works": not fault, **({"fault": fault} if fault else {})})
    package = PACKAGES.get(name, name)
    print(json.dumps({"client": package, "version": version(package), "rows": rows}))


if __name__ == "__main__":
    main()
