"""A text of the batch in arrays: which texts can be one, and what a step needs of it, at hand."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from operator import attrgetter

import numpy as np
import torch

from decodery.core.ledger import charging
from decodery.core.threads import one_thread
from decodery.models.cache.cache import KVCache
from decodery.models.cache.open_rows import OpenRows
from decodery.models.cache.page_pool import SLOTS, PagePool
from decodery.models.hooks import Tap
from decodery.models.protocol import LanguageModel
from decodery.models.step_arrays import StepArrays
from decodery.models.torch_state import in_plain_state
from decodery.sampling.batched import BatchedProcessors
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.sampling.sampler import Sampler
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.monitor import ScoredRow
from decodery.step.sequence import Sequence

from .commit import end_of, observed
from .monitoring import monitors_of
from .task import SchedulerEntry
from .text import choices_of

_RULE = Coupled()
TOKENS, STEPS = attrgetter("tokens"), attrgetter("steps")


Processors = NativeProcessors | BatchedProcessors
ProcessorsOf = Callable[[Sampler, int], Processors | None]


def in_arrays(seq: Sequence, model: LanguageModel, processors_of: ProcessorsOf) -> Processors | None:
    """What is applied to a text's logits in arrays; None where it needs more than the model and these.

    Args:
        seq: The text.
        model: The engine's.
        processors_of: Makes the processors of a sampler, None where some are applied text by text.
    """
    request = seq.request
    if request.model is not model or request.acceptance_rule != _RULE:
        return None
    if request.drafter is not None and request.draft_length is not None:
        return None
    if request.cache_policy is not None or request.logits_source is not None:
        return None
    monitors = monitors_of(seq)
    # On other devices each step would wait for what they read.
    native = processors_of is native_processors
    if monitors is not None and not (native and monitors.depths(model.config.num_layers) is not None):
        return None
    if request.return_draft_trees or seq.scheduling.prompt_owner is not None:
        return None
    return processors_of(request.sampler, request.vocab_size)


def is_open(seq: Sequence, pool: type[PagePool]) -> bool:
    """Whether a text has read all but its last token, into a cache that steps can append to.

    Args:
        seq: The text.
        pool: The kind of memory that steps write to.
    """
    cache = seq.cache
    if not seq.position or seq.segment_end is not None or seq.scheduling.branches is not None:
        return False
    if not isinstance(cache, KVCache) or cache.next_position != len(seq.tokens) - 1:
        return False
    return isinstance(cache.pages.pool, pool) and OpenRows.serves(cache)


def as_left(texts: Ordered[ArrayText]) -> list[bool]:
    """Whether each text, with its cache, is as the last step left it.

    Args:
        texts: The batch.
    """
    # One expression, with what `OpenRows.unchanged` compares: this is all that a step in arrays does for every text
    # beside appending its token, and calls would take longer than the comparisons.
    lengths = map(len, map(TOKENS, texts))
    return [
        (seq := text.seq).finish_reason is None
        and not seq.paused
        and (cache := seq.cache) is text.cache
        and seq.tokens is text.tokens
        and length == text.length
        and seq.request is text.request
        and seq.text is text.stream
        and seq.trace.steps is text.steps
        and cache.store is (rows := text.rows).store
        and rows.store.pages is rows.pages
        and cache.lengths is rows.lengths
        and rows.pages.written_from is rows.mine
        and cache.slot_positions.held is rows.positions
        and not cache.tentative
        and cache.policy is None
        and rows.store.losses.lost is None
        for text, length in zip(texts, lengths, strict=True)
    ]


class ArrayText:
    """A text of the batch: what a step needs of it at hand.

    Args:
        run: The scheduler's entry.
        processors: What is applied to its logits.
    """

    __slots__ = (
        "cache", "depths", "drafts", "eos", "held", "ledger", "length", "logprobs", "monitors", "most",
        "page_bytes", "processors", "request", "room", "rows", "run", "sampler", "seq", "stateful", "steps", "stream",
        "tokens", "windowed",
    )  # fmt: skip

    def __init__(self, run: SchedulerEntry, processors: Processors) -> None:
        assert isinstance(run.task, Sequence)
        seq = self.seq = run.task
        self.run, self.processors = run, processors
        self.request = request = seq.request
        self.drafts = request.drafter is not None
        self.sampler, self.stateful = request.sampler, request.sampler.stateful
        self.logprobs = request.logprobs
        self.eos, self.ledger = frozenset(request.eos_ids), seq.trace.ledger
        # One more row in each step, and those that are drafted.
        self.room = 1 + request.most_drafted
        self.most = request.prompt_length + request.max_new_tokens
        self.follow()

    def follow(self) -> None:
        """Go on with the cache that the text has now."""
        seq = self.seq
        self.cache: KVCache = seq.cache
        self.rows = OpenRows(seq.cache)
        self.tokens, self.steps, self.stream = seq.tokens, seq.trace.steps, seq.text
        self.monitors = monitors_of(seq)
        found = None if self.monitors is None else self.monitors.depths(seq.request.model.config.num_layers)
        self.depths = found or {}
        self.length = len(seq.tokens)
        self.windowed = seq.cache.window is not None
        # Of a page in all layers and heads, and of all caches.
        self.page_bytes, self.held = SLOTS * self.cache.slot_bytes, 0

    def emit(self, tokens: list[int], steps: StepArrays, rows: Callable[[int], int]) -> int:
        """Append accepted tokens one by one, up to the first that ends the text; returns how many.

        Args:
            tokens: The tokens.
            steps: The batch.
            rows: The row that predicted the token of a number.
        """
        seq, emitted = self.seq, 0
        for token in tokens:
            self.tokens.append(token)
            emitted += 1
            if self.monitors is None:
                self.end(token)
            else:
                self.watch(token, steps, rows(emitted - 1))
            if self.stateful:
                self.after(token)
            if seq.finish_reason is not None or (self.monitors is not None and self.rolls_back):
                break
        self.length += emitted
        self.ledger.tokens += emitted
        return emitted

    def end(self, token: int) -> None:
        """End the text where its last token does; a detokenizer that breaks ends it, too."""
        try:
            end_of(self.seq, token)
        except Exception as error:
            self.seq.fail(error)

    def watch(self, token: int, steps: StepArrays, row: int) -> None:
        """End the text where its last token does, and show that to the monitors.

        One that breaks ends the text.

        Args:
            token: The token.
            steps: The batch.
            row: The row that predicted it.
        """
        seq, monitors = self.seq, self.monitors
        assert monitors is not None
        try:
            if monitors.waits:
                end_of(seq, token)
                if monitors.note(seq, ScoredRow(steps.logits, row), self._states(steps, row)):
                    with one_thread(), charging(self.ledger):
                        monitors.catch_up()
                return
            monitors.remember(seq, seq.position - 1, seq.processor_states)
            end_of(seq, token)
            # On more threads a copy of a row would take the cores from the kernels for milliseconds.
            with one_thread(), charging(self.ledger):
                observed(seq, monitors, ScoredRow(steps.logits, row), self._states(steps, row))
        except Exception as error:
            seq.fail(error)

    def _states(self, steps: StepArrays, row: int) -> dict[Tap, torch.Tensor]:
        """Hidden states of a row; copies, as the next step writes to the same memory."""
        return {tap: steps.hidden[depth][row].clone() for tap, depth in self.depths.items()}

    @property
    def rolls_back(self) -> bool:
        """Whether a monitor wants tokens taken back."""
        return self.monitors is not None and self.monitors.requested is not None and self.seq.error is None

    @in_plain_state
    def roll_back(self) -> None:
        """Take back what a monitor wants taken back; the arrays must not hold the text."""
        assert self.monitors is not None
        try:
            with charging(self.ledger):
                self.monitors.roll_back(self.seq)
        except Exception as error:
            self.seq.fail(error)

    def look(self, steps: StepArrays, place: int) -> list[tuple[int, int]] | None:
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
        if isinstance(self.processors, NativeProcessors):
            self.processors.follow(seq.processor_states)
