"""One text being decoded: what a step changes of it, and where to find all else."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary, ref

from decodery.core.trace import Trace

from .bound_request import BoundRequest
from .part_states import PartStates

if TYPE_CHECKING:
    import torch

    from decodery.models.cache.cache import KVCache
    from decodery.models.hooks import Intervention
    from decodery.models.protocol import Reader
    from decodery.sampling.logits_processor import Context

    from .detokenizer import TextStream
    from .logits_source import LogitsSource

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
    """What a finished text leaves for one that goes on from it.

    Attributes:
        tokens: Its own, of which `cache` holds all but one.
        cache: Its keys and values.
        logits_source: What it was scored by, None for the model alone.
        model: Whose keys and values these are; they do not keep it in memory.
    """

    tokens: list[int]
    cache: KVCache
    logits_source: LogitsSource | None
    model: ref[Reader]


@dataclass
class Scheduling:
    """What the scheduler knows of a text.

    Args:
        prompt_owner: A text with the same prompt and source whose prefill this one will share by forking its cache.
        cached: Tokens of the prompt that others had read before.
        prompt_kept: Whether the prompt has been kept for later texts.
        branches: All forks of a text that a search has, itself included; None for a text that is decoded by itself.
    """

    prompt_owner: Sequence | None = None
    cached: int = 0
    prompt_kept: bool = False
    branches: WeakValueDictionary[int, Sequence] | None = field(default=None, repr=False)


@dataclass
class Sequence:
    """A text in progress.

    Its fields are what a step changes; the cache holds all tokens but the last.

    Args:
        request: What the text is to become and the parts that write it; no step changes it.
        tokens: The prompt and what follows it.
        cache: Keys and values of all tokens but the last.
        text: Turns its tokens into text and finds stop strings, None without a tokenizer.
        processor_states: The states of the sampler's processors, constraints among them, after the last token.
        trace: What its steps did.
        token_logprobs: Of its emitted tokens, where `request.logprobs` asks for them.
        prompt_token_logprobs: Of its prompt from the second token on, where `request.prompt_logprobs` asks for them.
        observed: Its first tokens whose rows the drafter has observed, which are not shown twice after a preemption.
        finish_reason: Why it ended, None while it goes on; stopped_by: the token, string or monitor that ended it.
        error: What it failed with.
        score: What a search ranked it by, higher is better; None where nothing was ranked.
        complete: False where a server that wrote it went away before its end.
        paused: Takes part in no pass until that is taken back.
        segment_end: Where a search writes it in segments, whether it has come to the end of one. It is called after
            every committed token, and what was accepted after the end is left.
        states: What the parts of a step remember of it.
        scheduling: What the scheduler knows of it.
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
        """Logits of its model without the ids that are no token.

        Args:
            logits: [n, vocab], which are written to.

        Returns:
            The same tensor.
        """
        padding = self.request.padding
        return logits if padding is None else padding.exclude(logits)

    def is_padding(self, token: int) -> bool:
        """Whether an id is no token of its model's: a rule that looks at no distribution must not accept it."""
        return self.request.padding is not None and self.request.padding.holds(int(token))

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What monitors change of its rows."""
        return self.states[self.request.monitors].interventions if self.request.monitors else ()

    def context(self) -> Context:
        """History of the next token, with the processors' states there."""
        request = self.request
        return request.sampler.context(self.tokens, request.prompt_length, self.processor_states, request.seed)

    @property
    def last_token(self) -> int:
        """The last token: known, not yet in the cache."""
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
        """How many output tokens no monitor takes back any more."""
        lag = 0
        if self.request.monitors and not self.finished:
            lag = self.states[self.request.monitors].rollback_tokens
        return max(self.position - lag, 0)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self.request.max_new_tokens - self.position

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def context_full(self) -> bool:
        """Whether it ended because the model's context has no position for another token."""
        return self.finish_reason == "length" and len(self.tokens) >= self.request.model.config.max_positions

    def rebind(self, **changes: Any) -> None:
        """Go on as another request.

        Args:
            changes: Fields of `BoundRequest`.
        """
        self.request = replace(self.request, **changes)

    def start_drafter(self) -> None:
        """Let the drafter, where there is one, begin at the text as it stands."""
        if (drafter := self.request.drafter) is not None:
            self.states[drafter] = drafter.start(self)

    def fork(self) -> Sequence:
        """A branch of this text with the state of all that acts on it.

        Memory is shared until one of the two writes. The trace stays common to both: it counts what all branches cost
        together. Drafters do not follow.
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
        """A fork that the loop writes on, with another seed: its drafter and its draft length policy follow.

        What it spends is that of the same request; its steps stand in a trace of its own.
        """
        clone, request = self.fork(), self.request
        clone.request = replace(request, seed=seed)
        clone.states.copy_from(self.states, self.request.memory.shared(), without=(request.monitors, request.model))
        clone.trace = Trace(ledger=self.trace.ledger)
        return clone

    def clone(self) -> Sequence:
        """A text of its own that goes on from here as this one would.

        With its drafter and its draft length policy. What is remembered beyond one text stays common to both.
        """
        clone = self.branch(self.request.seed)
        clone.trace = Trace(list(self.trace.steps), deepcopy(self.trace.ledger))
        if (branches := clone.scheduling.branches) is not None:
            del branches[id(clone)]
            clone.scheduling.branches = None
        return clone

    def fail(self, error: Exception) -> None:
        """Stop decoding with an error that the caller gets; what was committed stays."""
        self.error = error
        self.finish_reason = "error"

    def cancel(self) -> None:
        """Stop decoding; what was committed stays."""
        if not self.finished:
            self.finish_reason = "cancelled"
