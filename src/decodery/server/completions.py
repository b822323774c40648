"""`/v1/completions`: texts or tokens in, their continuations out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decodery.diffusion.texts import Fill
from decodery.engine.request import Request
from decodery.models.tokenizers.tokenizer import Tokenizer
from decodery.scorers.log_probability import LogProbability
from decodery.search.base import Search
from decodery.search.best_of_n import BestOfN
from decodery.step.sequence import TokenLogprob

from . import answer
from .errors import invalid
from .fields import CompletionRequest
from .job import FinishedText, Update
from .languages import drop_stop, language_of
from .methods import cache_policy_of, check_lengths, fill_of, search_of, searched, settings_of
from .plan import Form, Plan, models_of, several
from .request_preprocessor import RequestPreprocessor

_DEFAULT_TOKENS = 16
"""As OpenAI has it."""


async def plan(preprocessor: RequestPreprocessor, body: CompletionRequest) -> Plan:
    """What a completion asks of the engine.

    Raises:
        ApiError: For what cannot be done.
    """
    language = await preprocessor.do(lambda: language_of(preprocessor, body))
    drop_stop(body, language)
    constraint = await preprocessor.compile(language)
    return await preprocessor.do(lambda: _plan(preprocessor, body, constraint))


def _plan(preprocessor: RequestPreprocessor, body: CompletionRequest, constraint: Any) -> Plan:
    if body.decodery is not None and body.decodery.allow_special is not None:
        raise invalid("allow_special is of chat messages: in a prompt special tokens always are such", "allow_special")
    lm, n = preprocessor.lm, body.n or 1
    prompts = [
        preprocessor.truncated(tokens, body.truncate_prompt_tokens, cache_policy_of(body))
        for tokens in _prompts(preprocessor, body)
    ]
    if len(prompts) * n > preprocessor.settings.max_texts:
        raise invalid(
            f"{len(prompts)} prompts times n={n} are more than the {preprocessor.settings.max_texts} texts that one "
            "request may ask for",
            "prompt",
        )
    settings = settings_of(body, lm.model.vocab_size, preprocessor.settings.guards)
    if constraint is not None:
        settings["constraint"] = constraint
    echo, logprobs = bool(body.echo), body.logprobs
    if body.max_tokens == 0 and not echo:
        raise invalid("max_tokens must be at least 1, or 0 with echo", "max_tokens")
    own = body.decodery
    search = None if own is not None and own.diffuse is not None else search_of(body, lm, preprocessor.settings.search)
    if (best := _best_of(body, n)) is not None:
        if search is not None or (own is not None and own.diffuse is not None):
            raise invalid("best_of is a search of its own: leave best_of out, or the other one", "best_of")
        search = best.bind(lm.tokenizer)
    if search is not None:
        searched(settings, search, preprocessor.settings.search)
        if echo and logprobs is not None:
            raise invalid("a search reports no log-probabilities of the prompt: leave out echo or logprobs", "echo")
    steps = own is not None and own.trace == "steps"
    requests: list[Request | Fill] = []
    for tokens in prompts:
        # A text of no tokens is one that is cut before its first.
        most = max(preprocessor.room(len(tokens), body.max_tokens, _DEFAULT_TOKENS, cache_policy_of(body)), 1)
        check_lengths(body, most)
        counted = {} if logprobs is None else {"logprobs": logprobs}
        fill = fill_of(body, lm, tokens, settings | counted | {"max_new_tokens": most}, preprocessor.settings.search)
        if fill is not None:
            requests += several(fill, n)
            continue
        request = lm.request(tokens, apply_chat_template=False, max_new_tokens=most, logprobs=logprobs, **settings)
        prompt_logprobs = logprobs if echo and logprobs is not None else body.prompt_logprobs
        said = lm.conversation(tokens)
        request = replace(request, return_draft_trees=steps, prompt_logprobs=prompt_logprobs, conversation=said)
        requests += [request] if search is not None else several(request, n)
    given = _given(body)
    shown = [_shown(lm.tokenizer, *each) for each in zip(given, prompts, strict=True) for _ in range(n)] if echo else []
    reported = logprobs is not None, own is not None, steps
    form = CompletionForm(
        lm.tokenizer, *reported, [each for each in prompts for _ in range(n)], shown, body.max_tokens == 0,
        body.prompt_logprobs is not None,
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


def _best_of(body: CompletionRequest, n: int) -> Search | None:
    """The search that writes `best_of` texts, those with the highest log-probability per token first."""
    if body.best_of is None or body.best_of == n:
        return None
    if body.best_of < n:
        raise invalid(f"best_of must be at least n, and {body.best_of} is less than {n}", "best_of")
    return BestOfN(n=body.best_of, scorer=LogProbability())


def _given(body: CompletionRequest) -> list[Any]:
    """The prompts, each a text or tokens."""
    return [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt


def _prompts(preprocessor: RequestPreprocessor, body: CompletionRequest) -> list[list[int]]:
    """The prompts as tokens."""
    tokenizer, given = preprocessor.lm.tokenizer, _given(body)
    for each in given:
        if isinstance(each, str):
            preprocessor.check_length(each, cache_policy_of(body))
        elif len(each) >= preprocessor.reach(cache_policy_of(body)) or max(each) >= preprocessor.lm.model.vocab_size:
            preprocessor.room(len(each), body.max_tokens, None, cache_policy_of(body))
            raise invalid(
                f"the prompt has tokens outside of the vocabulary: the model has {preprocessor.lm.model.vocab_size}",
                "prompt",
            )
    if body.suffix:
        return [_gap(preprocessor, body, each) for each in given]
    tokens = [tokenizer.encode(each) if isinstance(each, str) else list(each) for each in given]
    if not all(tokens):
        raise invalid("a prompt has no tokens", "prompt")
    return tokens


def _shown(tokenizer: Tokenizer, given: Any, tokens: list[int]) -> tuple[str, list[int]]:
    """The text by which a prompt is echoed, and where its tokens begin in it."""
    if isinstance(given, str):
        return given, [first for first, _ in tokenizer.encoding(given, special=True).spans]
    # Half a character is shown with its other half.
    return tokenizer.stream(special=True).push(tokens), answer.Offsets(tokenizer.stream(special=True)).of(tokens)


def _gap(preprocessor: RequestPreprocessor, body: CompletionRequest, prompt: Any) -> list[int]:
    """The tokens that ask for what stands between a prompt and the suffix."""
    if body.echo or not isinstance(prompt, str):
        raise invalid("a suffix goes with prompts that are texts, and without echo", "suffix")
    assert body.suffix is not None
    preprocessor.check_length(body.suffix, cache_policy_of(body))
    tokens = preprocessor.lm.tokenizer.infill(prompt, body.suffix)
    if tokens is None:
        raise invalid("this model has no tokens to fill gaps with: leave suffix out, or serve one trained to", "suffix")
    return tokens


@dataclass
class CompletionForm(Form):
    """Body of a completion request.

    Attributes:
        logprobs, figures, steps: What is reported beside the text.
        prompts: Of each choice.
        shown: By choice, the prompt that is echoed, as a text and where its tokens begin; empty for none.
        bare: Nothing but the echo.
        prompt_logprobs: Whether the prompt's tokens are reported.
    """

    tokenizer: Tokenizer
    logprobs: bool
    figures: bool
    steps: bool
    prompts: Sequence[list[int]]
    shown: Sequence[tuple[str, list[int]]]
    bare: bool
    prompt_logprobs: bool
    _streamed: dict[int, answer.Offsets] = field(default_factory=dict)

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def of(self, text: FinishedText) -> FinishedText:
        if not self.bare:
            return text
        return replace(text, text="", tokens=[], logprobs=[], reason="length", context_full=False)

    def choice(self, index: int, text: FinishedText) -> dict[str, Any]:
        before, offsets = self.shown[index] if self.shown else ("", [])
        found: dict[str, Any] = {
            "index": index,
            "text": before + text.text,
            "logprobs": None,
            **answer.end(self.tokenizer, text, text.reason),
        }
        if self.logprobs:
            first = self.prompts[index][:1] if self.shown else []
            known: list[TokenLogprob | int] = [*first, *text.prompt_logprobs, *text.logprobs]
            own = self._offsets(index, len(before)).of(each.token for each in text.logprobs)
            found["logprobs"] = answer.completion_logprobs(self.tokenizer, known, [*offsets, *own])
        found |= answer.own_fields(text, self.figures)
        if self.prompt_logprobs:
            found["prompt_logprobs"] = answer.prompt_logprobs(self.tokenizer, text.prompt_logprobs)
        if self.steps:
            found["decodery"]["steps"] = answer.steps(self.tokenizer, text.trace.steps)
        return found

    def opening(self, index: int) -> list[dict[str, Any]]:
        # With log-probabilities the prompt is echoed when these are known.
        return [self._delta(index, self.shown[index][0])] if self.shown and not self.logprobs else []

    def grown(self, index: int, news: Update) -> list[dict[str, Any]]:
        if self.bare or (self.shown and self.logprobs):
            return []
        unfolding = answer.unfolding(self.tokenizer, news) if self.steps else {}
        if not (news.text or (self.logprobs and news.logprobs) or unfolding):
            return []
        delta = self._delta(index, news.text)
        if self.logprobs and news.logprobs:
            if index not in self._streamed:
                self._streamed[index] = self._offsets(index, 0)
            offsets = self._streamed[index].of(each.token for each in news.logprobs)
            delta["logprobs"] = answer.completion_logprobs(self.tokenizer, news.logprobs, offsets)
        if unfolding:
            delta["decodery"] = unfolding
        return [delta]

    def ended(self, index: int, news: Update, text: FinishedText) -> list[dict[str, Any]]:
        if self.shown and self.logprobs:
            return [self.choice(index, text)]
        last = self._delta(index, "") | answer.end(self.tokenizer, text, text.reason)
        last |= answer.own_fields(text, self.figures)
        return [*self.grown(index, news), last]

    def _offsets(self, index: int, at: int) -> answer.Offsets:
        """Of the text after a choice's prompt, of which `at` characters are shown."""
        stream = self.tokenizer.stream()
        stream.push(self.prompts[index])
        return answer.Offsets(stream, at)

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
