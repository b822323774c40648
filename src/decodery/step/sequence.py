"""One text that is being decoded: the state that steps change, and its request."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary, ref

from decodery.core.trace import Trace
from decodery.models.cache.cache import KVCache
from decodery.models.hooks import Intervention
from decodery.models.protocol import Reader
from decodery.sampling.logits_processor import Context

from .bound_request import BoundRequest
from .detokenizer import TextStream
from .logits_source import LogitsSource
from .part_states import PartStates

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "content_filter", "cancelled", "error"]


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the model's softmax, and those of the most likely ones.

    Attributes:
        token: The token's id.
        logprob: Natural logarithm of its probability.
        top: Ids and log-probabilities of the most likely tokens, best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, eq=False)
class KeptText:
    """The cache of a finished text, for a text that continues it.

    Attributes:
        tokens: Its tokens; `cache` has all but the last.
        cache: Its keys and values.
        logits_source: The logits source that scored it, None for the model's own logits.
        model: The model of these keys and values, as a weak reference.
    """

    tokens: list[int]
    cache: KVCache
    logits_source: LogitsSource | None
    model: ref[Reader]


@dataclass
class Scheduling:
    """The scheduler's state of a text.

    Args:
        prompt_owner: A text with the same prompt and source, whose prefill this one shares by forking its cache.
        cached: Number of prompt tokens that were in the cache already.
        prompt_kept: Whether the prompt was stored for later texts.
        branches: All forks of a text in a search, this one included; None for a text without forks.
    """

    prompt_owner: Sequence | None = None
    cached: int = 0
    prompt_kept: bool = False
    branches: WeakValueDictionary[int, Sequence] | None = field(default=None, repr=False)


@dataclass
class Sequence:
    """A text in progress.

    Its fields are the state that steps change; the cache has all tokens but the last.

    Attributes:
        request: The request, which no step changes.
        tokens: The prompt and the output.
        cache: Keys and values of all tokens but the last.
        text: Decodes its tokens and finds stop strings, None without a tokenizer.
        processor_states: The states of the sampler's processors, including constraints, after the last token.
        trace: The record of its steps.
        token_logprobs: Log-probabilities of its emitted tokens, where `request.logprobs` is set.
        prompt_token_logprobs: Those of its prompt from the second token on, where `request.prompt_logprobs` is set.
        observed: Number of first tokens whose rows the drafter has observed; after a preemption they are not observed
            again.
        finish_reason: Reason of its end, None while it continues.
        stopped_by: The token, string or monitor that ended it.
        error: The error that ended it, None for none.
        score: Score in a search, higher is better; None where it was not ranked.
        complete: False where a server that wrote it disconnected before its end.
        paused: Whether it is left out of all passes.
        segment_end: For searches that write in segments, the condition for the end of one. It is called after every
            committed token; accepted tokens after the end are dropped.
        states: The states of the parts of a step for this text.
        scheduling: The scheduler's state of it.
    """

    request: BoundRequest
    tokens: list[int]
    cache: KVCache
    text: TextStream | None = None
    processor_states: Any = None
    trace: Trace = field(default_factory=Trace)
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_logprobs: list[TokenLogprob] = field(default_factory=list)
    observed: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: int | str | None = None
    error: Exception | None = None
    score: float | None = None
    complete: bool = True
    paused: bool = False
    segment_end: Callable[[Sequence], bool] | None = None
    states: PartStates = field(default_factory=PartStates, repr=False, compare=False)
    scheduling: Scheduling = field(default_factory=Scheduling, repr=False, compare=False)

    def writable(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits of padding ids, which are not tokens, to -inf.

        Args:
            logits: [n, vocab], changed in place.

        Returns:
            The same tensor.
        """
        padding = self.request.padding
        return logits if padding is None else padding.exclude(logits)

    def is_padding(self, token: int) -> bool:
        """Whether an id is a padding id of its model; rules that use no distribution must not accept it."""
        return self.request.padding is not None and self.request.padding.holds(int(token))

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions of its monitors."""
        return self.states[self.request.monitors].interventions if self.request.monitors else ()

    def context(self) -> Context:
        """History of the next token, with the processors' states there."""
        request = self.request
        return request.sampler.context(self.tokens, request.prompt_length, self.processor_states, request.seed)

    @property
    def last_token(self) -> int:
        """The last token, which is not in the cache yet."""
        return self.tokens[-1]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.request.prompt_length :]

    @property
    def position(self) -> int:
        """Index of the next output token, 0 for the first."""
        return len(self.tokens) - self.request.prompt_length

    @property
    def settled(self) -> int:
        """Number of output tokens that no monitor can take back any more."""
        lag = 0
        if self.request.monitors and not self.finished:
            lag = self.states[self.request.monitors].rollback_tokens
        return max(self.position - lag, 0)

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be emitted."""
        return self.request.max_new_tokens - self.position

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def context_full(self) -> bool:
        """Whether it ended because the model's context is full."""
        return self.finish_reason == "length" and len(self.tokens) >= self.request.model.config.max_positions

    def rebind(self, **changes: Any) -> None:
        """Replace fields of the request.

        Args:
            changes: Fields of `BoundRequest`.
        """
        self.request = replace(self.request, **changes)

    def start_drafter(self) -> None:
        """Start the drafter, if there is one, with the current text."""
        if (drafter := self.request.drafter) is not None:
            self.states[drafter] = drafter.start(self)

    def fork(self) -> Sequence:
        """Make a branch of this text with the states of its parts, without those of drafters.

        Memory is shared until one of the two writes. Both share one trace, which counts the cost of all branches.
        """
        request = self.request
        clone = replace(
            self,
            request=replace(request, drafter=None),
            tokens=list(self.tokens),
            cache=self.cache.fork(),
            text=None if self.text is None else self.text.fork(),
            token_logprobs=list(self.token_logprobs),
            prompt_token_logprobs=list(self.prompt_token_logprobs),
            segment_end=None,
            states=self.states.only(request.draft_length),
            scheduling=replace(self.scheduling),
        )
        if request.monitors:
            clone.states[request.monitors] = self.states[request.monitors].fork()
        if (branches := clone.scheduling.branches) is not None:
            branches[id(clone)] = clone
        return clone

    def branch(self, seed: int) -> Sequence:
        """Make a fork with another seed that the engine continues, with its drafter and draft length policy.

        Its cost counts for the same request; its steps have a separate trace.
        """
        clone, request = self.fork(), self.request
        clone.request = replace(request, seed=seed)
        clone.states.copy_from(self.states, self.request.memory.shared(), without=(request.monitors, request.model))
        clone.trace = Trace(ledger=self.trace.ledger)
        return clone

    def clone(self) -> Sequence:
        """Make an independent copy that continues as this text would, with its drafter and length policy.

        Stores that outlive a text are shared by both.
        """
        clone = self.branch(self.request.seed)
        clone.trace = Trace(list(self.trace.steps), deepcopy(self.trace.ledger))
        if (branches := clone.scheduling.branches) is not None:
            del branches[id(clone)]
            clone.scheduling.branches = None
        return clone

    def fail(self, error: Exception) -> None:
        """Stop decoding with an error for the caller; committed tokens are kept."""
        self.error = error
        self.finish_reason = "error"

    def cancel(self) -> None:
        """Stop decoding; committed tokens are kept."""
        if not self.finished:
            self.finish_reason = "cancelled"
