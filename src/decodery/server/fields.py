"""What requests say: OpenAI's fields, and one object of our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

_SPEC = Annotated[StrictStr, Field(max_length=2000)]
_LONG_SPEC = Annotated[StrictStr, Field(max_length=65536)]


def _whole(value: Any) -> Any:
    """5.0 is a integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Bounds stand before it: those after are checked, and not published as bounds.
_WHOLE = BeforeValidator(_whole)
Token = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1), _WHOLE]
Tokens = Annotated[list[Token], Field(min_length=1)]


class Methods(BaseModel):
    """Methods by name, with settings, as in "prompt-lookup:length=5"; `decodery methods` lists them.

    sampler takes the place of temperature and all other settings of it.

    Attributes:
        fresh_memory: Drafters know nothing of earlier texts, and later ones learn nothing of this.
        trace: What choices are answered with under "decodery": figures of the whole text, or the steps as well, in
            streams as they come.
    """

    model_config = ConfigDict(extra="forbid")

    drafter: _SPEC | None = None
    acceptance_rule: _SPEC | None = None
    draft_length: _SPEC | None = None
    max_draft_tokens: Annotated[int, Field(strict=True, ge=1, le=1024), _WHOLE] | None = None
    sampler: _SPEC | Annotated[list[_SPEC], Field(max_length=32)] | None = None
    logits_source: _SPEC | None = None
    constraint: _LONG_SPEC | None = None
    search: _SPEC | None = None
    diffuse: _SPEC | None = None
    cache_policy: _SPEC | None = None
    monitor: _SPEC | Annotated[list[_SPEC], Field(max_length=8)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=0), _WHOLE] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    ignore_eos: StrictBool | None = None
    min_new_tokens: Annotated[int, Field(strict=True, ge=0), _WHOLE] | None = None
    allow_special: StrictBool | None = None
    fresh_memory: StrictBool | None = None
    trace: Literal["summary", "steps"] = "summary"


class StreamOptions(BaseModel):
    """Options of a streamed answer.

    Attributes:
        include_usage: End a stream with a chunk of the totals.
    """

    include_usage: StrictBool | None = False


class Shared(BaseModel):
    """What both kinds of completion take. Without a temperature texts are greedy; without a seed it is 0."""

    model: StrictStr | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128), _WHOLE] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=0), _WHOLE] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), le=2**64 - 1), _WHOLE] | None = None
    stop: (
        Annotated[StrictStr, Field(min_length=1, max_length=256)]
        | Annotated[list[Annotated[StrictStr, Field(min_length=1, max_length=256)]], Field(max_length=16)]
        | None
    ) = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    decodery: Methods | None = None


class FunctionSpec(BaseModel):
    """A function that may be called.

    Attributes:
        parameters: A JSON schema of an object.
    """

    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(BaseModel):
    """The name of a function."""

    name: StrictStr


class ChosenTool(BaseModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class SchemaFormat(BaseModel):
    """A JSON schema that the answer follows."""

    name: StrictStr | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """What the answer is: text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class Part(BaseModel):
    """A piece of a message; texts only."""

    type: Literal["text"]
    text: StrictStr


class CalledFunction(BaseModel):
    """A function, and the JSON text of its arguments."""

    name: StrictStr
    arguments: StrictStr


class ToolCall(BaseModel):
    """A call that the assistant made."""

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[Part], Field(min_length=1)] | None = None
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: StrictStr | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class PredictedContent(BaseModel):
    """What the answer is expected to be, but for a few changes."""

    type: Literal["content"]
    content: StrictStr | list[Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Shared):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1), _WHOLE] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20), _WHOLE] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: StrictBool | None = None
    prediction: PredictedContent | None = None


class CompletionRequest(Shared):
    """`POST /v1/completions`."""

    prompt: (
        Annotated[StrictStr, Field(min_length=1)]
        | Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=2048)]
    )
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20), _WHOLE] | None = None
    echo: StrictBool | None = None
    best_of: Annotated[int, Field(strict=True, ge=1, le=128), _WHOLE] | None = None
    suffix: StrictStr | None = None


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: the tokens of a text, or of a conversation as the model reads it."""

    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`: the text of some tokens, special ones shown."""

    tokens: list[Token]
