"""A request bound to a model: all of one text that no step changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decodery.core.conversation import Conversation

from .drafter_memory import Memory

if TYPE_CHECKING:
    from decodery.models.protocol import Reader
    from decodery.models.tokenizers.vocabularies import Padding
    from decodery.sampling.sampler import Sampler

    from .acceptance_rule import AcceptanceRule
    from .cache_policy import CachePolicy
    from .detokenizer import Detokenizer
    from .draft_length_policy import DraftLengthPolicy
    from .drafter import Drafter
    from .embedded import Embeddings
    from .logits_source import LogitsSource
    from .monitor import Monitor
    from .scorer_calls import ScorerCalls
    from .search_record import SearchRecord


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundRequest:
    """What a text is to become, and the parts that write it.

    Args:
        prompt_length: Tokens of the prompt.
        model: The target: what `logits_source` made of the engine's model where there is one.
        vocab_size: Of the target.
        sampler: The processors of the target's logits, and the draws.
        acceptance_rule: What verifies drafts.
        drafter: None for plain decoding.
        draft_length: None where the drafter alone decides how much it drafts.
        max_draft_tokens: Drafted tokens per step at most.
        logits_source: What makes the logits, None for the model alone.
        cache_policy: What of its keys and values is kept and read, None for all.
        monitors: What watches the text.
        detokenizer: Makes what turns its tokens into text, None where there is no tokenizer.
        seed: Decides every draw.
        max_new_tokens: Tokens that may be emitted.
        eos_ids: Tokens that end it.
        logprobs: How many most likely tokens to report beside each emitted one, None to report nothing.
        prompt_logprobs: The same beside each token of the prompt but the first.
        return_draft_trees: Whether the trace keeps the draft of every step.
        memory: What drafters may remember beyond this text.
        cache_namespace: See `Request`.
        role: Of `model` in the ledger where it is not the engine's own.
        slots: Slots that its caches get at once, None where they grow with it.
        chunk: Rows of its prompt in one pass at most where a drafter needs all of them, None for no bound.
        conversation: What the prompt was made of.
        calls: Opens texts after other prompts, for scorers of this text; None where none can be opened.
        prompt_embeds: What the prompt holds beside tokens, None for nothing.
        user_spans: See `PromptTokens`.
        padding: Ids that are no token and are never written, None where there are none.
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
