"""`/v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from decodery.constraints.base import ConstraintSpec
from decodery.constraints.tool_calls import MARK, FunctionCall
from decodery.diffusion.texts import Fill
from decodery.engine.request import Request
from decodery.llm.chat_answer import read_answer, reasoned
from decodery.models.tokenizers.reasoning import ReasoningMarks, ReasoningSplitter
from decodery.models.tokenizers.tokenizer import Tokenizer

from . import answer
from .errors import invalid
from .fields import ChatRequest
from .job import FinishedText, Update
from .languages import drop_stop, language_of
from .messages import encoded, tools_in_use
from .methods import CANVAS_TOKENS, cache_policy_of, check_lengths, fill_of, search_of, searched, settings_of
from .plan import Form, Plan, models_of, several
from .reasoning_fields import reasoning_of
from .request_preprocessor import RequestPreprocessor


async def plan(preprocessor: RequestPreprocessor, body: ChatRequest) -> Plan:
    """What a chat completion asks of the engine.

    Raises:
        ApiError: For what cannot be done.
    """
    prompt = await preprocessor.do(lambda: _prompt(preprocessor, body))
    constraint = await preprocessor.compile(prompt.language)
    return await preprocessor.do(lambda: _plan(preprocessor, body, prompt, constraint))


@dataclass(frozen=True)
class _Prompt:
    """A prompt that is read.

    Attributes:
        tokens: Its tokens.
        turns: The messages that the template made it of.
        language: What the answer follows, reasoning part included; None where it is free.
        marks: How the answer marks its reasoning part; None where it has none.
    """

    tokens: list[int]
    turns: list[Any]
    language: ConstraintSpec | None
    marks: ReasoningMarks | None


def _prompt(preprocessor: RequestPreprocessor, body: ChatRequest) -> _Prompt:
    """The prompt of a request, and what its answer follows."""
    lm, policy = preprocessor.lm, cache_policy_of(body)
    language = language_of(preprocessor, body)
    drop_stop(body, language)
    template = "" if lm.chat_template is None else lm.chat_template.source
    variables, budget, asked = reasoning_of(body, template)
    given, turns = encoded(
        preprocessor, body.messages, tools_in_use(body), policy,
        variables=variables, continue_final_message=bool(body.continue_final_message),
        allow_special=body.decodery is not None and bool(body.decodery.allow_special),
    )  # fmt: skip
    tokens = preprocessor.truncated(given, body.truncate_prompt_tokens, policy)
    marks = lm.reasoning_marks(tokens)
    if preprocessor.settings.constraint is not None:
        # A reasoning part is free text, which would stand outside of what every text must follow.
        if asked or variables.get("enable_thinking"):
            raise invalid("this server constrains every text: leave out what asks for reasoning")
        budget = 0 if marks is not None and marks.inside else None
    language, marks = reasoned(language, marks, budget, asked=asked)
    return _Prompt(tokens, turns, language, marks)


def _plan(preprocessor: RequestPreprocessor, body: ChatRequest, prompt: _Prompt, constraint: Any) -> Plan:
    lm, tokens = preprocessor.lm, prompt.tokens
    own = body.decodery
    allow = own is not None and bool(own.allow_special)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if wanted == 0:
        raise invalid("max_tokens must be at least 1", "max_tokens")
    settings = settings_of(body, lm.model.vocab_size, preprocessor.settings.guards)
    canvas = own is not None and own.diffuse is not None
    settings["max_new_tokens"] = preprocessor.room(
        len(tokens), wanted, CANVAS_TOKENS if canvas else None, cache_policy_of(body)
    )
    check_lengths(body, settings["max_new_tokens"])
    if constraint is not None:
        settings["constraint"] = constraint
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        settings["logprobs"] = body.top_logprobs or 0
    if body.prediction is not None:
        preprocessor.check_length(body.prediction.text)
        settings["predicted_output"] = body.prediction.text
    steps, n = own is not None and own.trace == "steps", body.n or 1
    fill = fill_of(body, lm, tokens, settings, preprocessor.settings.search)
    search = None if fill is not None else search_of(body, lm, preprocessor.settings.search)
    requests: list[Request] | list[Fill]
    if fill is not None:
        requests = several(fill, n)
    else:
        if search is not None:
            searched(settings, search, preprocessor.settings.search)
        request = lm.request(tokens, **settings)
        request.conversation = lm.conversation(prompt.turns, allow_special=allow)
        request.return_draft_trees, request.prompt_logprobs = steps, body.prompt_logprobs
        requests = [request] if search is not None else several(request, n)
    older = bool(body.functions) and not body.tools
    reported = bool(body.logprobs), own is not None, steps
    form = ChatForm(
        lm.tokenizer, *reported, bool(tools_in_use(body)), older, prompt_logprobs=body.prompt_logprobs is not None,
        marks=prompt.marks,
        reasoning=body.include_reasoning is not False and not (body.thinking and body.thinking.display == "omitted"),
    )  # fmt: skip
    return Plan(
        requests,
        n,
        form,
        search,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        models_of(requests[0], lm.model),
    )


@dataclass
class ChatForm(Form):
    """Body of a chat completion request.

    Attributes:
        logprobs, figures, steps: What is reported beside the text.
        calls: Whether it may call tools.
        older: Whether calls are reported as `function_call`.
        prompt_logprobs: Whether the prompt's tokens are reported.
        marks: How the text marks what is thought, where it does.
        reasoning: Whether that is reported.
    """

    tokenizer: Tokenizer
    logprobs: bool
    figures: bool
    steps: bool
    calls: bool
    older: bool
    prompt_logprobs: bool
    marks: ReasoningMarks | None = None
    reasoning: bool = True
    _kept: dict[int, _Kept] = field(default_factory=dict)
    _thoughts: dict[int, ReasoningSplitter] = field(default_factory=dict)

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def reasoning_tokens(self, text: FinishedText) -> int:
        return 0 if self.marks is None else answer.reasoning_tokens(self.tokenizer, text.tokens, self.marks)

    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        thought, said, calls = self._read(text)
        message: dict[str, Any] = {"role": "assistant", "content": said or (None if calls else ""), "refusal": None}
        message |= self._thought(thought)
        if calls and self.older:
            message["function_call"] = _function(calls[0])
        elif calls:
            message["tool_calls"] = [_call(call) for call in calls]
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": answer.chat_logprobs(self.tokenizer, text.logprobs) if self.logprobs else None,
            **answer.end(self.tokenizer, text, self._reason(text, calls)),
        }
        found |= answer.own_fields(text, self.figures)
        if self.prompt_logprobs:
            found["prompt_logprobs"] = answer.prompt_logprobs(self.tokenizer, text.prompt_logprobs)
        if self.steps:
            found["decodery"]["steps"] = answer.steps(self.tokenizer, text.trace.steps)
        return found

    def opening(self, index: int) -> list[dict[str, Any]]:
        self._kept[index] = _Kept()
        if self.marks is not None:
            self._thoughts[index] = ReasoningSplitter(self.marks)
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def grown(self, index: int, news: Update, *, final: bool = False) -> list[dict[str, Any]]:
        thought, text = "", news.text
        if self.marks is not None:
            thought, text = self._thoughts[index].push(text, final=final)
        said = self._kept[index].push(text) if self.calls else text
        shown = self._thought(thought)
        unfolding = answer.unfolding(self.tokenizer, news) if self.steps else {}
        if not (said or shown or (self.logprobs and news.logprobs) or unfolding):
            return []
        delta = self._delta(index, shown | ({"content": said} if said else {}))
        if self.logprobs and news.logprobs:
            delta["logprobs"] = answer.chat_logprobs(self.tokenizer, news.logprobs)
        if unfolding:
            delta["decodery"] = unfolding
        return [delta]

    def ended(self, index: int, news: Update, text: FinishedText) -> list[dict[str, Any]]:
        found = self.grown(index, news, final=True)
        _, _, calls = self._read(text)
        if self.calls and not calls and (rest := self._kept[index].rest):
            found.append(self._delta(index, {"content": rest}))
        for number, call in enumerate(calls):
            if self.older:
                found.append(self._delta(index, {"function_call": _function(call)}))
                break
            found.append(self._delta(index, {"tool_calls": [{"index": number, **_call(call)}]}))
        last = (
            self._delta(index, {})
            | answer.end(self.tokenizer, text, self._reason(text, calls))
            | answer.own_fields(text, self.figures)
        )
        return [*found, last]

    def _read(self, text: FinishedText) -> tuple[str, str, list[FunctionCall]]:
        """What was thought, what is said, and the calls."""
        return read_answer(text.text, self.marks, calls=self.calls)

    def _thought(self, thought: str) -> dict[str, Any]:
        """What was thought, by the two names that clients have for it."""
        return {"reasoning_content": thought, "reasoning": thought} if thought and self.reasoning else {}

    def _reason(self, text: FinishedText, calls: list[FunctionCall]) -> str:
        named = "function_call" if self.older else "tool_calls"
        return named if calls and text.reason == "stop" else text.reason

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


@dataclass
class _Kept:
    """What of a streamed text is not said yet, because it is a call or may become one."""

    rest: str = ""

    def push(self, text: str) -> str:
        """What of the text so far may be said."""
        self.rest += text
        at = self.rest.find(MARK)
        if at < 0:
            length = min(len(MARK) - 1, len(self.rest))
            while length and not self.rest.endswith(MARK[:length]):
                length -= 1
            at = len(self.rest) - length
        said, self.rest = self.rest[:at], self.rest[at:]
        return said


def _function(call: FunctionCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def _call(call: FunctionCall) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": _function(call)}
