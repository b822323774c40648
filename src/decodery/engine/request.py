"""What a caller asks of the engine for one text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import dataclass, field

from decodery.core.conversation import Conversation
from decodery.core.errors import SettingsError
from decodery.core.registry import method_of, resolve
from decodery.core.settings import plain
from decodery.core.trace import Trace
from decodery.models.protocol import LanguageModel
from decodery.sampling.banned import Banned
from decodery.sampling.constraint import constrained
from decodery.sampling.logits_processor import Stage
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.awrs import AWRS
from decodery.speculative.acceptance.coupled import Coupled
from decodery.speculative.drafters.forced import Forced, unforced
from decodery.step.acceptance_rule import AcceptanceRule
from decodery.step.cache_policy import CachePolicy
from decodery.step.draft_length_policy import LARGEST, MOST_NODES, DraftLengthPolicy
from decodery.step.drafter import Drafter
from decodery.step.drafter_memory import Memory
from decodery.step.embedded import Embeddings
from decodery.step.logits_source import LogitsSource
from decodery.step.monitor import Monitor
from decodery.step.search_record import SearchRecord
from decodery.step.sequence import KeptText, Sequence

from .validation import refuse

_KINDS: dict[str, tuple[str, type]] = {
    "drafter": ("drafter", Drafter),
    "acceptance_rule": ("acceptance-rule", AcceptanceRule),
    "draft_length": ("draft-length", DraftLengthPolicy),
    "logits_source": ("logits-source", LogitsSource),
    "cache_policy": ("cache-policy", CachePolicy),
}


@dataclass
class Request:
    """Settings of one text.

    drafter, acceptance_rule, draft_length, logits_source, cache_policy and each of the monitors may be names, as in
    "prompt-lookup:length=5". What goes with what is decided here, for all kinds of requests. With a constraint in the
    sampler, tokens it forces are drafted too; one that has no mask is asked about single tokens, by the acceptance rule
    awrs in place of coupled.

    Attributes:
        prompt: Token ids, at least one.
        max_new_tokens: Most tokens of the output.
        sampler: Greedy by default.
        drafter: None for no speculation.
        acceptance_rule: What decides about drafts.
        seed: Decides what is drawn.
        stop: Strings that end the text and are cut from it.
        eos_ids: Tokens that end it.
        logprobs: How many most likely tokens to report beside each emitted one (0: the emitted one alone).
        reuse: A finished text whose cache serves as far as its tokens agree with the prompt; not used where there is a
            source.
        draft_length: How much to draft, None where the drafter alone decides.
        logits_source: What makes the logits out of one or more models and contexts, None for the model alone.
        cache_policy: What of the text's keys and values is kept and read, None for all of them.
        monitors: What watches it.
        max_draft_tokens: Drafted tokens per step at most, whatever both want.
        search: Whose branches these are, None for a text of its own.
        prompt_logprobs: The same of the prompt's tokens, but the first.
        cache_namespace: Texts share what was read of their prompts with those of the same cache_namespace only.
        return_draft_trees: Keep the draft of every step in the trace.
        conversation: What the prompt was made of, for searches that ask for texts after other prompts.
        prompt_embeds: What the prompt holds beside tokens; the model reads it in place of the tokens at these places.
        memory: What drafters learn from and add to, None for the engine's own.
        settled: Called by searches that know it, with all of the text that is returned first that cannot change any
            more.
        followed: Called by searches that grow a tree of parts, with the trace that they grow it in.
        stop_tokens: Those of them that are special tokens, by id.
        record: Keeps what a search writes and scores, and what it has written and scored before.
    """

    prompt: Ordered[int]
    max_new_tokens: int = 128
    sampler: Sampler = field(default_factory=Sampler.from_settings)
    drafter: Drafter | None = None
    acceptance_rule: AcceptanceRule = field(default_factory=Coupled)
    seed: int = 0
    stop: Ordered[str] = ()
    eos_ids: Ordered[int] = ()
    logprobs: int | None = None
    reuse: Sequence | KeptText | None = None
    draft_length: DraftLengthPolicy | None = None
    logits_source: LogitsSource | None = None
    cache_policy: CachePolicy | None = None
    monitors: Ordered[Monitor] = ()
    max_draft_tokens: int = MOST_NODES
    search: object = None
    prompt_logprobs: int | None = None
    cache_namespace: str = ""
    return_draft_trees: bool = False
    conversation: Conversation | None = None
    prompt_embeds: Embeddings | None = None
    memory: Memory | None = None
    settled: Callable[[str], None] | None = None
    followed: Callable[[Trace], None] | None = None
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    record: SearchRecord | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_draft_tokens", "seed", "logprobs", "prompt_logprobs"):
            setattr(self, name, plain(getattr(self, name)))
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be an integer of at least 1, not {self.max_new_tokens!r}")
        if not isinstance(self.max_draft_tokens, int) or not 1 <= self.max_draft_tokens <= LARGEST:
            raise SettingsError(
                f"max_draft_tokens must be an integer between 1 and {LARGEST}, not {self.max_draft_tokens!r}"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise SettingsError(f"seed must be an integer from 0 to 2^64 - 1, not {self.seed!r}")
        if any(not isinstance(string, str) or not string for string in self.stop):
            raise SettingsError("stop must be non-empty strings")
        if not isinstance(self.cache_namespace, str) or any(
            "\ud800" <= each <= "\udfff" for each in self.cache_namespace
        ):
            raise SettingsError(f"cache_namespace must be text, not {self.cache_namespace!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None and not 0 <= count <= 100:
                raise SettingsError(f"{name} must lie between 0 and 100, not {count}")
        self._resolve()
        self._constrain()
        refuse(self)
        self._tell_of_cuts()

    def _resolve(self) -> None:
        """Let instances take the place of names."""
        for role, (family, kind) in _KINDS.items():
            part = getattr(self, role)
            if isinstance(part, str):
                setattr(self, role, resolve(family, part))
            elif not isinstance(part, kind) and not (part is None and role != "acceptance_rule"):
                article = "an acceptance rule of tokens" if role == "acceptance_rule" else f"a {kind.__name__}"
                raise SettingsError(f"{role} must be {article} or the name of one, not {part!r}")
        given = [self.monitors] if isinstance(self.monitors, str | Monitor) else self.monitors
        self.monitors = tuple(resolve("monitor", each) for each in given)

    def bind(self, model: LanguageModel) -> Request:
        """The same request with what its drafter brings along for texts of `model`.

        Raises:
            SettingsError, UnsupportedModel: If the model does not give what some part needs.
        """
        found = self if self.drafter is None else copy(self)
        found.drafter = None if self.drafter is None else self.drafter.bind(model, self.logits_source)
        refuse(found, model)
        return found

    def _constrain(self) -> None:
        """Let what goes with a constraint take the place of rule and drafter."""
        processors = self.sampler.processors
        if any(monitor.rollback_tokens for monitor in self.monitors) and not any(
            isinstance(processor, Banned) for processor in processors
        ):
            # After the masks: where a constraint allows nothing else, what was taken back is written again.
            masks = sum(processor.stage is Stage.MASK for processor in processors)
            self.sampler = Sampler((*processors[:masks], Banned(), *processors[masks:]))
        found = constrained(processors)
        if found is None:
            return
        if not found[1].provides.mask and self.acceptance_rule == Coupled():
            # The same tokens, without a question about every one of the vocabulary.
            self.acceptance_rule = AWRS()
        if self.drafter is not None and self.acceptance_rule.provides.mask and not isinstance(self.drafter, Forced):
            self.drafter = Forced(self.drafter)

    def _tell_of_cuts(self) -> None:
        """Say so where `max_draft_tokens` leaves less than the settings of drafter and budget ask for."""
        if self.drafter is None:
            return
        # What a constraint forces comes as it comes; it is the drafter inside that was set to ask for so much.
        drafter = unforced(self.drafter)
        parts = (drafter,) if self.draft_length is None else (drafter, self.draft_length)
        wanted = min((size for part in parts if (size := part.largest()) is not None), default=0)
        if wanted > self.max_draft_tokens:
            method = method_of(drafter)
            name = type(drafter).__name__ if method is None else method.name
            warnings.warn(
                f"{name} drafts up to {wanted} tokens per step as it is set, and max_draft_tokens leaves "
                f"{self.max_draft_tokens}: allow max_draft_tokens={min(wanted, LARGEST)} for all of them, or "
                "ask it for fewer",
                stacklevel=2,
            )
