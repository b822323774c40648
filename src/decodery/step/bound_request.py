"""A request bound to a model: the data of one text that no step changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decodery.core.conversation import Conversation
from decodery.models.protocol import Reader
from decodery.models.tokenizers.vocabularies import Padding
from decodery.sampling.sampler import Sampler

from .detokenizer import Detokenizer
from .draft_length_policy import DraftLengthPolicy
from .drafter import Drafter
from .drafter_memory import Memory
from .embedded import Embeddings
from .logits_source import LogitsSource
from .scorer_calls import ScorerCalls
from .search_record import SearchRecord

if TYPE_CHECKING:
    from .acceptance_rule import AcceptanceRule
    from .cache_policy import CachePolicy
    from .monitor import Monitor


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundRequest:
    """The settings of a text, and the parts that decode it.

    Args:
        prompt_length: Tokens of the prompt.
        model: The target model, with `logits_source` applied where there is one.
        vocab_size: Vocabulary size of the target.
        sampler: The processors of the target's logits, and the draws.
        acceptance_rule: The rule that verifies drafts.
        drafter: The drafter, None for plain decoding.
        draft_length: The draft length policy, None where only the drafter decides how much it drafts.
        max_draft_tokens: Maximum number of drafted tokens per step.
        logits_source: The logits source, None for the model's own logits.
        cache_policy: The KV cache policy, None to keep all keys and values.
        monitors: The monitors of the text.
        detokenizer: Makes the detokenizer of the text, None where there is no tokenizer.
        seed: Seed of all draws.
        max_new_tokens: Maximum number of emitted tokens.
        eos_ids: Tokens that end it.
        logprobs: Number of most likely tokens to report beside each emitted one, None to report none.
        prompt_logprobs: The same beside each token of the prompt but the first.
        return_draft_trees: Whether the trace keeps the draft of every step.
        memory: Stores of drafters that outlive this text.
        cache_namespace: See `Request`.
        role: Name of `model` in the ledger where it is not the engine's own.
        slots: Slots that its caches reserve at the start, None where they grow with the text.
        chunk: Maximum rows of its prompt in one pass where a drafter needs all of them, None for no bound.
        conversation: The conversation that the prompt was made from.
        calls: Opens texts after other prompts, for scorers of this text; None where none can be opened.
        prompt_embeds: Embeddings in the prompt, None for tokens only.
        user_spans: See `PromptTokens`.
        padding: Padding ids of the vocabulary, which are never written; None where there are none.
        record: See `Request`.
    """

    prompt_length: int
    model: Reader
    vocab_size: int
    sampler: Sampler
    acceptance_rule: AcceptanceRule
    drafter: Drafter | None = None
    draft_length: DraftLengthPolicy | None = None
    max_draft_tokens: int
    logits_source: LogitsSource | None = None
    cache_policy: CachePolicy | None = None
    monitors: tuple[Monitor, ...] = ()
    detokenizer: Callable[[], Detokenizer] | None = None
    seed: int = 0
    max_new_tokens: int = 128
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_draft_trees: bool = False
    memory: Memory = field(default_factory=Memory)
    cache_namespace: str = ""
    role: str = ""
    slots: int | None = None
    chunk: int | None = None
    conversation: Conversation | None = None
    calls: ScorerCalls | None = field(default=None, repr=False)
    prompt_embeds: Embeddings | None = None
    user_spans: tuple[tuple[int, int], ...] | None = None
    padding: Padding | None = None
    record: SearchRecord | None = None

    @property
    def most_drafted(self) -> int:
        """Nodes that a draft has at most."""
        if self.drafter is None:
            return 0
        own = self.drafter.largest()
        return self.max_draft_tokens if own is None else min(own, self.max_draft_tokens)
