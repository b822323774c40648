"""What requests say: OpenAI's fields, and one object of our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, StrictBool, StrictStr

from .reasoning_fields import ReasoningFields
from .sampler_fields import WHOLE, MaxTokens, SamplerFields, Token
from .tool_fields import AllowedChoice, ChosenFunction, ChosenTool, FunctionSpec, Tool

SPEC = Annotated[StrictStr, Field(max_length=2000)]
_LONG_SPEC = Annotated[StrictStr, Field(max_length=65536)]

Tokens = Annotated[list[Token], Field(min_length=1)]


class Methods(BaseModel):
    """Methods by name, with settings, as in "prompt-lookup:length=5"; `decodery methods` lists them.

    sampler takes the place of temperature and all other settings of the sampler.

    Attributes:
        fresh_memory: Drafters know nothing of earlier texts, and later ones learn nothing of this.
        trace: What choices are answered with under "decodery": figures of the whole text, or the steps as well, in
            streams as they come.
    """

    model_config = ConfigDict(extra="forbid")

    drafter: SPEC | None = None
    acceptance_rule: SPEC | None = None
    draft_length: SPEC | None = None
    max_draft_tokens: Annotated[int, Field(strict=True, ge=1, le=1024), WHOLE] | None = None
    sampler: SPEC | Annotated[list[SPEC], Field(max_length=32)] | None = None
    logits_source: SPEC | None = None
    constraint: _LONG_SPEC | None = None
    search: SPEC | None = None
    diffuse: SPEC | None = None
    cache_policy: SPEC | None = None
    monitor: SPEC | Annotated[list[SPEC], Field(max_length=8)] | None = None
    allow_special: StrictBool | None = None
    fresh_memory: StrictBool | None = None
    trace: Literal["summary", "steps"] = "summary"


class StreamOptions(BaseModel):
    """Options of a streamed answer.

    Attributes:
        include_usage: End a stream with a chunk of the totals.
    """

    include_usage: StrictBool | None = False


class Body(BaseModel):
    """The body of a request."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Unknown fields of the request."""
        return self._ignored

    def ignore(self, fields: list[str]) -> None:
        self._ignored = fields


class StructuredOutputs(BaseModel):
    """What the answer follows, as vLLM has it: one of these.

    Attributes:
        schema_: A JSON schema, or its text.
        regex: A regular expression.
        choice: Texts, one of which the answer is.
        grammar: A Lark grammar.
        json_object: Any JSON object.
    """

    model_config = ConfigDict(extra="forbid")

    schema_: dict[str, Any] | _LONG_SPEC | None = Field(default=None, alias="json")
    regex: _LONG_SPEC | None = None
    choice: Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1, max_length=4096)] | None = (
        None
    )
    grammar: _LONG_SPEC | None = None
    json_object: StrictBool | None = None


class SchemaFormat(BaseModel):
    """A JSON schema that the answer follows."""

    name: StrictStr | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """What the answer is: text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class Shared(SamplerFields, Body):
    """What both kinds of completion take.

    Attributes:
        prompt_logprobs: Report the tokens of the prompt as well, each with so many most likely ones.
        truncate_prompt_tokens: Read only so many tokens of the prompt, its last ones; -1: as many as fit.
    """

    model: StrictStr | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128), WHOLE] | None = None
    max_tokens: MaxTokens = Field(default=None, validation_alias=AliasChoices("max_tokens", "n_predict"))
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | _LONG_SPEC | None = None
    guided_regex: _LONG_SPEC | None = None
    guided_choice: Annotated[list[StrictStr], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: _LONG_SPEC | None = None
    json_schema: dict[str, Any] | None = None
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=20), WHOLE] | None = None
    truncate_prompt_tokens: Annotated[int, Field(strict=True, ge=-1), WHOLE] | None = None
    decodery: Methods | None = None


class Part(BaseModel):
    """A piece of a message: a text, or what a model refused with."""

    type: Literal["text", "refusal"]
    text: StrictStr = Field(validation_alias=AliasChoices("text", "refusal"))


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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | list[Part] | None = None
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: StrictStr | None = None
    function_call: CalledFunction | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""

    @property
    def calls(self) -> list[CalledFunction]:
        """The functions that it calls, the older form included."""
        found = [call.function for call in self.tool_calls or ()]
        return found if self.function_call is None else [*found, self.function_call]


class PredictedContent(BaseModel):
    """What the answer is expected to be, but for a few changes."""

    type: Literal["content"]
    content: StrictStr | list[Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(ReasoningFields, Shared):
    """`POST /v1/chat/completions`.

    Attributes:
        functions, function_call: Tools as they were named before.
        chat_template_kwargs: Variables for the chat template, such as {"enable_thinking": false}.
        include_reasoning: Report what the model thinks; false leaves it out.
        continue_final_message: Go on with the last message, which the assistant began.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: Annotated[list[FunctionSpec], Field(max_length=128)] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    prediction: PredictedContent | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    continue_final_message: StrictBool | None = None
    include_reasoning: StrictBool | None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools, the older form included."""
        return [*(self.tools or ()), *(Tool(type="function", function=each) for each in self.functions or ())]

    @property
    def choice_of_tools(self) -> str | ChosenTool | AllowedChoice | None:
        """What is said about calling them, the older form included."""
        if self.tool_choice is not None or self.function_call is None:
            return self.tool_choice
        named = self.function_call
        return named if isinstance(named, str) else ChosenTool(type="function", function=named)


def _number_of_logprobs(value: Any) -> Any:
    """Some clients send what chats take: true is the most likely one, false is none."""
    return (1 if value else None) if isinstance(value, bool) else value


class CompletionRequest(Shared):
    """`POST /v1/completions`."""

    prompt: (
        Annotated[StrictStr, Field(min_length=1)]
        | Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=2048)]
    )
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20), BeforeValidator(_number_of_logprobs), WHOLE] | None = None
    echo: StrictBool | None = None
    best_of: Annotated[int, Field(strict=True, ge=1, le=128), WHOLE] | None = None
    suffix: StrictStr | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: the tokens of a text, or of a conversation as the model reads it.

    vLLM's form has `prompt` or `messages`, llama.cpp's `content`.

    Attributes:
        add_special_tokens, add_special: Add the model's first token to a text; by default to a `prompt` alone.
        return_token_strs, with_pieces: Return the tokens' texts as well.
        parse_special: Read special tokens that are spelled in `content` as such.
    """

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    content: StrictStr | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    continue_final_message: StrictBool | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = None
    add_special: StrictBool = False
    parse_special: StrictBool = True
    with_pieces: StrictBool = False


class DetokenizeRequest(Body):
    """`POST /detokenize`: the text of some tokens, special ones shown."""

    model: StrictStr | None = None
    tokens: list[Token]
