"""From a prompt and settings by name to tokens and a request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from functools import cached_property, partial
from typing import Any, TypeVar, cast, get_origin

from decodery.constraints.json_schema import JSONSchema
from decodery.core.conversation import Conversation, Prompt, PromptTokens
from decodery.core.errors import DecoderyError, PromptError, SettingsError
from decodery.core.method_spec import is_untrusted
from decodery.core.registry import resolve
from decodery.core.settings import checked
from decodery.engine.output import Output
from decodery.engine.request import Request
from decodery.logits_sources.reads import Reads
from decodery.models.loaders.load import LoadedModel
from decodery.models.tokenizers.chat_prompt import chat_tokens
from decodery.models.tokenizers.reasoning import ReasoningMarks, marks_of
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.models.torch.encoder_decoder import EncoderDecoder
from decodery.sampling.constraint import Constrained, Constraint
from decodery.sampling.logits_processor import LogitsProcessor
from decodery.sampling.sampler import Sampler
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.cache_policy import CachePolicy
from decodery.step.draft_length_policy import MOST_NODES, DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.step.embedded import Embeddings
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.sequence import Sequence

from .chat_answer import described
from .other_names import OTHER_NAMES
from .prompts import check_messages, one
from .resolve_settings import (
    build_sampler,
    check_lengths,
    left_by,
    resolve_cache_policy,
    resolve_logits_source,
    resolve_monitors,
    stop_ids,
    stop_tokens,
    warn_of_idle,
    with_predicted_output,
)

DRY_BREAKERS = ("\n", ":", '"', "*")
"""Where repetitions end unless a request says otherwise."""

_MARKED = 16
"""Tokens at the end of a prompt among which the mark of a reasoning part may be."""

F = TypeVar("F", bound=Callable[..., Any])


def naming(method: F) -> F:
    """Decorates a method of a loaded model: commands that its errors advise name that model.

    Those of requests from a network do not: where a model lies is the server's own business.
    """

    @functools.wraps(method)
    def call(self: PromptRequests, *arguments: Any, **settings: Any) -> Any:
        try:
            return method(self, *arguments, **settings)
        except DecoderyError as error:
            if not is_untrusted():
                error.name_model(self.origin)
            raise

    return cast(F, call)


class PromptRequests:
    """A loaded model with its tokenizer and chat template, and what is asked of it.

    Args:
        origin: What the model was loaded as.
        memory: What drafters have learned from its texts.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self.name = loaded.name
        self.origin = loaded.origin
        self.dtype = loaded.dtype
        self.memory = Memory()

    def encode(
        self,
        prompt: Prompt | Ordered[int],
        *,
        apply_chat_template: bool = True,
        allow_special: bool = False,
        tools: Ordered[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a prompt: one turn of the user where the model has a chat template.

        Args:
            prompt: a text, chat messages `{"role": ..., "content": ...}`, or token ids, which stay as they are.
            apply_chat_template: False takes a text as it is: special tokens that it spells are special tokens.
            allow_special: let special tokens that a chat message spells be special tokens, too; they are text
                otherwise, in every role.
            tools: functions that the model may call, as JSON schemas, for the chat template; the system message
                describes them where that has no form for them.
            chat_template_kwargs: variables for the chat template, such as {"enable_thinking": False}.
            continue_final_message: end with the last message, which the model goes on with.

        Returns:
            The ids, as `PromptTokens`.

        Raises:
            PromptError: the prompt is empty, none or several, no valid text, or not what the chat template takes.
            SettingsError: chat messages for a model without a chat template.
        """
        given = one(prompt)
        if isinstance(given, PromptTokens):
            return given
        if isinstance(given, str):
            if not apply_chat_template or self.chat_template is None:
                return self.tokenizer.encode(given)
            given = [{"role": "user", "content": given}]
        elif self.chat_template is None:
            raise SettingsError("this model has no chat template, so it takes no chat messages: give generate a text")
        elif not apply_chat_template:
            raise SettingsError("chat messages need the chat template: leave out apply_chat_template, or give a text")
        check_messages(given, self.chat_template.source)
        turns, functions = described(given, tools or (), self.chat_template.source)
        return chat_tokens(
            self.chat_template,
            self.tokenizer,
            turns,
            tools=functions,
            variables=chat_template_kwargs,
            continue_final_message=continue_final_message,
            allow_special=allow_special,
        )

    def reasoning_marks(self, tokens: Ordered[int]) -> ReasoningMarks | None:
        """How a text after this prompt marks its reasoning part, None for a model that writes none."""
        if self.chat_template is None:
            return None
        end = self.tokenizer.decode(list(tokens[-_MARKED:]), special=True)
        return marks_of(self.chat_template.source, end)

    def reset_memory(self) -> None:
        """Forget what drafters have learned from earlier texts; texts in progress keep what they hold.

        The drafter `auto`, among others, remembers what it wrote: an equal prompt takes far fewer passes the second
        time. Call this before each run that is timed or counted.
        """
        self.memory.clear()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes after every token of the model."""
        return Vocabulary.of(self.tokenizer, self.model.vocab_size)

    @checked(Sampler.from_settings, but=("eos_ids",), elsewhere=OTHER_NAMES)
    @naming
    def request(
        self,
        tokens: Ordered[int],
        *,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        sampler: Sampler | LogitsProcessor | str | Ordered[Any] | None = None,
        drafter: Drafter | str | None = "auto",
        predicted_output: str | Ordered[int] | None = None,
        acceptance_rule: AcceptanceRule | str = "coupled",
        draft_length: DraftLengthPolicy | str | None = None,
        max_draft_tokens: int = MOST_NODES,
        seed: int = 0,
        stop: str | Ordered[str] = (),
        stop_token_ids: Ordered[int] = (),
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        logprobs: int | None = None,
        reuse: Output | Sequence | None = None,
        logits_source: LogitsSource | str | None = None,
        cache_policy: CachePolicy | str | None = None,
        monitor: Monitor | str | Ordered[Monitor | str] | None = None,
        apply_chat_template: bool = True,
        return_draft_trees: bool = False,
        fresh_memory: bool = False,
        constraint: Any = None,
        prompt_embeds: Any = (),
        placeholder: str = "<image>",
        **shortcuts: Any,
    ) -> Request:
        """A request with everything resolved from names.

        temperature and shortcuts (top_k, top_p, min_p, typical, epsilon, eta, top_h, xtc, mirostat, repetition_penalty,
        presence_penalty, frequency_penalty, dry, no_repeat_ngram, logit_bias, order: see `Sampler.from_settings`) build
        the usual sampler; `sampler` takes a processor or several in its place. dry_breakers: texts here, as in
        llama.cpp.

        Args:
            drafter, acceptance_rule, draft_length: An instance or a name as in "prompt-lookup:length=5"; without a
                drafter there is no speculation, without a draft length policy the drafter alone decides how much it
                drafts.
            predicted_output: A text, or its tokens, that the output is expected to repeat for the most part; the
                drafter `predicted-output` drafts it.
            max_draft_tokens: Drafted tokens per step at most, whatever both want.
            stop: Texts that end it and are cut from it; a special token, such as "<|im_end|>", by its spelling.
            stop_token_ids: Tokens that end it beside the model's own end tokens, and are cut from the text as those
                are.
            logits_source: What makes the logits, as in "guidance:scale=1.5"; None is the model alone.
            cache_policy: What of the text's keys and values is kept and read, as in "h2o:budget=0.3"; None is all of
                them.
            monitor: What watches the text, one or several, as in "los:head=DIR,action=stop", or None; `Output.monitors`
                says what they found. A model with an encoder reads the tokens with that, and writes a text of its own;
                it has no other source.
            apply_chat_template: Whether the source's texts are turns of the user, as prompts are.
            return_draft_trees: Keep the draft of every step in the trace, see `llm.tree_picture`.
            fresh_memory: Drafters know nothing of earlier texts, and no later one learns of this.
            constraint: What may be written, such as `JSONSchema(schema)` or the schema as a dict, a name with settings,
                or a `Constraint` of one's own; a text that finishes with "stop" is then always complete, one cut by its
                length need not be. A drafter also drafts what the constraint forces. Constraints without a mask go with
                the acceptance rule awrs in place of coupled.
            prompt_embeds: What the model reads in the place of each `placeholder`, a token of its own, in the prompt:
                tensors [n, hidden], such as what a vision tower makes of images; or all of it placed already, as
                `Embeddings`.
        """
        check_lengths(min_new_tokens, max_new_tokens)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        ends = stop_ids(stop_token_ids, self.model.vocab_size)
        eos = (*(() if ignore_eos else self.tokenizer.eos_ids), *ends)
        placed = prompt_embeds if isinstance(prompt_embeds, Embeddings) else None
        if placed is None and len(prompt_embeds):
            standing = self.tokenizer.token_id(placeholder)
            if standing is None:
                raise PromptError(f"{placeholder!r} is no token of this model: name one that stands for embeddings")
            tokens, placed = Embeddings.placed(tokens, standing, prompt_embeds)
        if isinstance(self.model, EncoderDecoder) and not isinstance(logits_source, Reads):
            if logits_source is not None:
                raise SettingsError("the prompt is this model's source of logits: leave logits_source out")
            tokens, logits_source = [self.model.config.start_id], Reads(tuple(tokens))
        if shortcuts.get("dry"):
            breakers = shortcuts.get("dry_breakers")
            shortcuts["dry_breakers"] = self.vocabulary.holding(DRY_BREAKERS if breakers is None else breakers)
        built = build_sampler(sampler, temperature, min_new_tokens, eos, shortcuts)
        if constraint is not None:
            if ignore_eos or ends:
                name = "ignore_eos" if ignore_eos else "stop_token_ids"
                raise SettingsError(f"a constrained text ends where it is complete: leave out {name}")
            built = Sampler((Constrained(self._compiled(constraint)), *built.processors))
        return Request(
            tokens,
            max_new_tokens=max_new_tokens,
            sampler=built,
            drafter=with_predicted_output(drafter, self._predicted(predicted_output)),
            acceptance_rule=resolve("acceptance-rule", acceptance_rule),
            draft_length=None if draft_length is None else resolve("draft-length", draft_length),
            max_draft_tokens=max_draft_tokens,
            seed=seed,
            stop=stop,
            stop_tokens=stop_tokens(stop, self.tokenizer),
            eos_ids=tuple(eos),
            logprobs=logprobs,
            reuse=left_by(reuse),
            logits_source=resolve_logits_source(
                logits_source, lambda text: self.encode(text, apply_chat_template=apply_chat_template)
            ),
            cache_policy=resolve_cache_policy(cache_policy),
            return_draft_trees=return_draft_trees,
            monitors=resolve_monitors(monitor),
            prompt_embeds=placed,
            memory=Memory() if fresh_memory else None,
        )

    def request_for(
        self,
        prompt: Prompt | Ordered[int],
        *,
        apply_chat_template: bool = True,
        allow_special: bool = False,
        tokens: Ordered[int] | None = None,
        **settings: Any,
    ) -> Request:
        """A `request` that knows what its prompt was made of, as some searches and models on servers must.

        Args:
            tokens: The prompt's, where they are known already.
        """
        warn_of_idle(settings)
        tokens = tokens or self.encode(prompt, apply_chat_template=apply_chat_template, allow_special=allow_special)
        request = self.request(tokens, **{"apply_chat_template": apply_chat_template} | settings)
        request.conversation = self.conversation(
            prompt, apply_chat_template=apply_chat_template, allow_special=allow_special
        )
        return request

    def conversation(
        self, prompt: Prompt | Ordered[int], *, apply_chat_template: bool = True, allow_special: bool = False
    ) -> Conversation:
        """A prompt before it is rendered, of which others can be made. For the arguments see `encode`."""
        given = one(prompt)
        if isinstance(given, PromptTokens):
            given, apply_chat_template = self.tokenizer.decode(given, special=True), False
        encode = partial(self.encode, apply_chat_template=apply_chat_template, allow_special=allow_special)
        applied = apply_chat_template and self.chat_template is not None
        return Conversation(given, encode, self._compiled, apply_chat_template=applied)

    def _predicted(self, given: str | Ordered[int] | None) -> Callable[[], Ordered[int]] | None:
        """Makes the tokens of a predicted output, text or tokens; None where it is empty."""
        if not given:
            return None
        return lambda: self.tokenizer.encode_after(given) if isinstance(given, str) else given

    def _compiled(self, constraint: Any) -> Constraint:
        if isinstance(constraint, Constraint):
            return constraint
        if isinstance(constraint, Mapping):
            constraint = JSONSchema(constraint)
        if isinstance(constraint, list | tuple):
            raise SettingsError(f"a list is no constraint: give Choice({constraint!r:.60})")
        if isinstance(constraint, type) or get_origin(constraint) is not None:
            name = getattr(constraint, "__name__", constraint)
            raise SettingsError(f"a type is no constraint: give PythonType({name}), whose parse reads the text")
        return resolve("constraint", constraint).compile(self.vocabulary)
