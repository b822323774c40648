"""One text being decoded: its tokens, its cache, and the state of everything that acts on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary, ref

from decodery.core.conversation import Conversation
from decodery.core.trace import Trace

from .drafter_memory import Memory

if TYPE_CHECKING:
    import torch

    from decodery.engine.calls import Calls
    from decodery.engine.monitoring import Watch
    from decodery.models.cache.cache import KVCache
    from decodery.models.hooks import Intervention
    from decodery.models.protocol import Reader
    from decodery.models.tokenizers.vocabularies import Padding
    from decodery.sampling.logits_processor import Context
    from decodery.sampling.sampler import Sampler

    from .acceptance_rule import AcceptanceRule
    from .cache_policy import CachePolicy
    from .detokenizer import Detokenizer, TextStream
    from .draft_length_policy import DraftLengthPolicy
    from .drafter import Drafter
    from .embedded import Embeddings
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


@dataclass(slots=True)
class Watched:
    """What a monitor found of a text.

    Attributes:
        name: The monitor's.
        limit: Scores above it are flagged.
        scores: After every output token, None where nothing was known yet.
        flagged: The first output position whose score was above the limit, None for none.
        error: What turned it off, where it was to go on without.
    """

    name: str
    limit: float
    scores: list[float | None] = field(default_factory=list)
    flagged: int | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON has words for."""
        return {
            "name": self.name,
            "limit": self.limit if math.isfinite(self.limit) else None,
            "score": self.scores[-1] if self.scores else None,
            "flagged": self.flagged,
            "scores": self.scores,
            **({} if self.error is None else {"error": self.error}),
        }


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
class Sequence:
    """A request in progress.

    The cache holds all tokens but the last one. draft_state, draft_length_state and sampler_state belong to the
    drafter, the draft length policy and the sampler; the engine only hands them back.

    Attributes:
        model: The target, what `logits_source` made of the engine's model where there is one.
        max_draft_tokens: Most drafted tokens per step.
        detokenizer: Makes what turns its tokens into text, None where there is no tokenizer.
        logprobs: How many most likely tokens to report beside each emitted one, None to report nothing.
        draft_length: None where the drafter alone decides how much it drafts.
        memory: What drafters may remember beyond this sequence.
        score: What a search ranked it by, higher is better; None where nothing was ranked.
        paused: Takes part in no pass until that is taken back.
        shown: The first tokens whose rows the drafter has seen: where they are read again, because the cache was given
            up, it is not shown them twice.
        cache_policy: What of its keys and values is kept and read, None for all.
        like: A sequence with the same prompt and source, whose prefill this one will share by forking its cache.
        branches: All forks of a text that a search has, itself included, while they are about; None for a text that is
            decoded by itself.
        prompt_logprobs: How many most likely tokens to report beside each of the prompt's.
        told: Those that are known, from its second token on.
        salt, return_draft_trees: See `Request`.
        cached: How many tokens of the prompt others had read before.
        prompt_kept: Whether it has been left for others in turn.
        held: Where a search writes it in parts, whether it has come to the end of one; asked after every token that is
            committed, and what was accepted after it is left.
        role: What `model` goes by in the ledger where it is not the engine's own.
        conversation: What its prompt was made of.
        calls: Opens texts after other prompts, for scorers that judge this one, None if there can be none.
        written_by: What a model that writes texts by itself keeps of this one.
        complete: False where it is not all that it would have been, because its writer went away.
        watch: Its monitors, None for none.
        prompt_embeds: What its prompt holds beside tokens, None for nothing.
        user_spans: See `PromptTokens`.
        padding: Ids that are no token and are never written, None where there are none.
    """

    tokens: list[int]
    prompt_length: int
    cache: KVCache
    sampler: Sampler
    acceptance_rule: AcceptanceRule
    drafter: Drafter | None
    vocab_size: int
    model: Reader
    max_draft_tokens: int
    detokenizer: Callable[[], Detokenizer] | None = None
    seed: int = 0
    max_new_tokens: int = 128
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    text: TextStream | None = None
    draft_length: DraftLengthPolicy | None = None
    draft_state: Any = None
    draft_length_state: Any = None
    slots: int | None = None
    chunk: int | None = None
    sampler_state: Any = None
    memory: Memory = field(default_factory=Memory)
    trace: Trace = field(default_factory=Trace)
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped_by: int | str | None = None
    error: Exception | None = None
    score: float | None = None
    paused: bool = False
    shown: int = 0
    logits_source: LogitsSource | None = None
    cache_policy: CachePolicy | None = None
    like: Sequence | None = None
    branches: WeakValueDictionary[int, Sequence] | None = field(default=None, repr=False, compare=False)
    prompt_logprobs: int | None = None
    told: list[TokenLogprob] = field(default_factory=list)
    salt: str = ""
    return_draft_trees: bool = False
    cached: int = 0
    prompt_kept: bool = False
    held: Callable[[Sequence], bool] | None = None
    role: str = ""
    conversation: Conversation | None = None
    calls: Calls | None = field(default=None, repr=False, compare=False)
    written_by: Any = field(default=None, repr=False, compare=False)
    complete: bool = True
    watch: Watch | None = None
    prompt_embeds: Embeddings | None = None
    user_spans: tuple[tuple[int, int], ...] | None = None
    padding: Padding | None = None

    def writable(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of its model without the ids that are no token.

        Args:
            logits: [n, vocab], which are written to.

        Returns:
            The same tensor.
        """
        return logits if self.padding is None else self.padding.exclude(logits)

    def is_padding(self, token: int) -> bool:
        """Whether an id is no token of its model's: a rule that looks at no distribution must not accept it."""
        return self.padding is not None and self.padding.holds(int(token))

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """What monitors change of its rows."""
        return () if self.watch is None else self.watch.interventions

    def context(self) -> Context:
        """History of the next token, with the sampler's state there."""
        return self.sampler.context(self.tokens, self.prompt_length, self.sampler_state, self.seed)

    @property
    def pending(self) -> int:
        """The last token: known, not yet in the cache."""
        return self.tokens[-1]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def position(self) -> int:
        """Index of the next output token, 0 for the first."""
        return len(self.tokens) - self.prompt_length

    @property
    def settled(self) -> int:
        """How many output tokens no monitor takes back any more."""
        lag = 0 if self.finished or self.watch is None else self.watch.rolls
        return max(self.position - lag, 0)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self.max_new_tokens - self.position

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def context_full(self) -> bool:
        """Whether it ended because the model's context has no place for another token."""
        return self.finish_reason == "length" and len(self.tokens) >= self.model.config.max_positions

    def fork(self) -> Sequence:
        """A branch of this text with the state of all that acts on it.

        Memory is shared until one of the two writes. The trace stays common to both: it counts what all branches cost
        together. Drafters do not follow.
        """
        twin = replace(
            self,
            tokens=list(self.tokens),
            cache=self.cache.fork(),
            text=None if self.text is None else self.text.fork(),
            token_logprobs=list(self.token_logprobs),
            told=list(self.told),
            drafter=None,
            draft_state=None,
            held=None,
            watch=None if self.watch is None else self.watch.fork(),
        )
        if twin.branches is not None:
            twin.branches[id(twin)] = twin
        return twin

    def branch(self, seed: int) -> Sequence:
        """A fork with another seed that the engine decodes, with drafter, policy and memory.

        What it spends is that of the same request; its steps stand in a trace of its own.
        """
        twin, shared = self.fork(), self.memory.shared()
        twin.drafter = self.drafter
        twin.draft_state = deepcopy(self.draft_state, dict(shared))
        twin.draft_length_state = deepcopy(self.draft_length_state, dict(shared))
        twin.trace, twin.seed = Trace(ledger=self.trace.ledger), seed
        return twin

    def twin(self) -> Sequence:
        """An independent text that continues from here as this one would, with drafter, policy and memory.

        What is remembered beyond one text stays common to both.
        """
        trace = Trace(list(self.trace.steps), deepcopy(self.trace.ledger))
        return replace(self.branch(self.seed), trace=trace, branches=None)

    def fail(self, error: Exception) -> None:
        """Stop decoding for a reason the caller must hear of; what was committed stays."""
        self.error = error
        self.finish_reason = "error"

    def cancel(self) -> None:
        """Stop decoding; what was committed stays."""
        if not self.finished:
            self.finish_reason = "cancelled"
