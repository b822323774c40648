"""A text of the batch in arrays: which texts can be one, and what a step needs of it, at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from decodery.models.cache.cache import KVCache
from decodery.models.cache.open_rows import OpenRows
from decodery.models.protocol import LanguageModel
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import NodeDistributions
from decodery.step.bound_request import BoundRequest
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence

from .accounting import OWN
from .commit import end_of
from .task import SchedulerEntry
from .text import choices_of

if TYPE_CHECKING:
    from decodery.models.native.array_step import ArraySteps


_RULE = Coupled()


def in_arrays(seq: Sequence, model: LanguageModel) -> NativeProcessors | None:
    """What kernels apply to a text's logits; None where it needs more than the model and these.

    Args:
        seq: The text.
        model: The engine's.
    """
    request = seq.request
    if request.model is not model or request.acceptance_rule != _RULE:
        return None
    if request.drafter is not None and (request.draft_length is not None or request.drafter.asks(seq)):
        return None
    if request.monitors or request.cache_policy is not None or request.logits_source is not None:
        return None
    if request.logprobs is not None or request.return_draft_trees or seq.scheduling.prompt_owner is not None:
        return None
    return native_processors(request.sampler, request.vocab_size)


def is_open(seq: Sequence) -> bool:
    """Whether a text has read all but its last token, into a cache that kernels can append to."""
    cache = seq.cache
    if not seq.position or seq.segment_end is not None or seq.scheduling.branches is not None:
        return False
    return isinstance(cache, KVCache) and cache.next_position == len(seq.tokens) - 1 and OpenRows.serves(cache)


def _most_drafted(request: BoundRequest) -> int:
    """Rows that a draft of a text takes at most."""
    if request.drafter is None:
        return 0
    own = request.drafter.largest()
    return request.max_draft_tokens if own is None else min(own, request.max_draft_tokens)


class ArrayText:
    """A text of the batch: what a step needs of it at hand.

    Args:
        run: The scheduler's entry.
        processors: What the kernels apply to its logits.
    """

    __slots__ = (
        "cache", "drafts", "eos", "ledger", "length", "most", "processors", "request", "room", "rows", "run", "sampler",
        "seq", "stateful", "steps", "stream", "tokens", "windowed",
    )  # fmt: skip

    def __init__(self, run: SchedulerEntry, processors: NativeProcessors) -> None:
        assert isinstance(run.task, Sequence)
        seq = self.seq = run.task
        self.run, self.processors = run, processors
        self.request = request = seq.request
        self.drafts = request.drafter is not None
        self.sampler, self.stateful = request.sampler, request.sampler.stateful
        self.eos, self.ledger = frozenset(request.eos_ids), seq.trace.ledger
        # One more row in each step, and those that are drafted.
        self.room = 1 + _most_drafted(request)
        self.most = request.prompt_length + request.max_new_tokens
        self.follow()

    def follow(self) -> None:
        """Go on with the cache that the text has now."""
        seq = self.seq
        self.cache: KVCache = seq.cache
        self.rows = OpenRows(seq.cache)
        self.tokens, self.steps, self.stream = seq.tokens, seq.trace.steps, seq.text
        self.length = len(seq.tokens)
        self.windowed = seq.cache.window is not None

    def spend(self, rows: int, seconds: float, passes: int) -> None:
        """Enter a pass in the ledger.

        Args:
            rows: Of this text.
            seconds: Of these rows.
            passes: Of the model before it.
        """
        ledger, run = self.ledger, self.run
        if OWN in ledger.passes:
            ledger.passes[OWN] += 1
            ledger.rows[OWN] += rows
            ledger.seconds[OWN] += seconds
        else:
            ledger.spend(OWN, rows, seconds, first=True)
        run.served = passes + 1
        run.depth += 1
        if run.depth > ledger.depth:
            ledger.depth = run.depth

    def emit(self, tokens: list[int]) -> list[int]:
        """Append accepted tokens up to the first that ends the text; returns those."""
        seq, stream, emitted = self.seq, self.stream, list[int]()
        length = self.length + len(tokens)
        # Where no token can end the text, and no caller waits for it, all are taken at once.
        if (stream is None or stream.lazy) and length < self.most and self.eos.isdisjoint(tokens):
            self.tokens += tokens
            if stream is not None:
                stream.waiting += tokens
            self.ledger.tokens += length - self.length
            self.length = length
            return tokens
        for token in tokens:
            self.tokens.append(token)
            emitted.append(token)
            self.end(token)
            if seq.finish_reason is not None:
                break
        self.length += len(emitted)
        self.ledger.tokens += len(emitted)
        return emitted

    def end(self, token: int) -> None:
        """End the text where its last token does; a detokenizer that breaks ends it, too."""
        try:
            end_of(self.seq, token)
        except Exception as error:
            self.seq.fail(error)

    def look(self, steps: ArraySteps, place: int) -> list[tuple[int, int]] | None:
        """Choose where kernels could not tell numbers apart; returns `choices`, None where it failed.

        Args:
            steps: The batch.
            place: The text's number in it.
        """
        seq, first, size = self.seq, int(steps.first[place]), int(steps.sizes[place])
        rows = slice(first, first + size)
        tree = DraftTree(steps.tokens[rows].copy(), steps.parents[rows].astype(np.int64))
        try:
            laws = NodeDistributions(tree, steps.logits[rows], seq)
            found = _RULE.choose(tree, laws, seq)
        except Exception as error:
            seq.fail(error)
            return None
        steps.accepted[place], steps.chosen[place] = len(found.path), found.bonus
        steps.paths[first : first + len(found.path)] = found.path
        steps.keep(place)
        return choices_of(tree, found.path)

    def after(self, token: int) -> None:
        """Let the sampler's processors remember a token; the kernels go by them from now."""
        seq = self.seq
        seq.processor_states = self.sampler.follow(seq.processor_states, token)
        self.processors.follow(seq.processor_states)

    @property
    def unchanged(self) -> bool:
        """Whether the text is as the last step left it, with room in its cache for another step."""
        seq = self.seq
        return (
            seq.finish_reason is None
            and not seq.paused
            and seq.cache is self.cache
            and seq.tokens is self.tokens
            and seq.request is self.request
            and len(self.tokens) == self.length
            and seq.text is self.stream
            and seq.trace.steps is self.steps
            and self.rows.has_room(self.room)
        )
