"""The texts whose steps need nothing but the model: one batch in arrays, one native call per step for all of them."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decodery.core.ledger import Ledger
from decodery.core.trace import RecordedTree, Step
from decodery.models.cache.cache import KVCache, resident
from decodery.models.cache.open_rows import OpenRows
from decodery.models.protocol import LanguageModel
from decodery.models.torch_state import in_plain_state
from decodery.sampling.native_processors import NativeProcessors, native_processors
from decodery.speculative.acceptance.coupled import Coupled
from decodery.step.acceptance_rule import Accepted, NodeDistributions
from decodery.step.draft_tree import DraftTree
from decodery.step.sequence import Sequence

from .accounting import OWN
from .commit import end_of
from .schedule import Schedule
from .task import SchedulerEntry, Task
from .text import expect

if TYPE_CHECKING:
    from decodery.models.native.array_step import ArraySteps

_RULE = Coupled()


class ArrayText:
    """A text of the batch: what a step needs of it at hand.

    Args:
        run: The scheduler's entry.
        processors: What the kernels apply to its logits.
    """

    __slots__ = (
        "cache", "eos", "last_slot", "ledger", "length", "most", "processors", "request", "rows", "run", "sampler",
        "seq", "stateful", "steps", "stream", "tokens", "windowed",
    )  # fmt: skip

    def __init__(self, run: SchedulerEntry, processors: NativeProcessors) -> None:
        assert isinstance(run.task, Sequence)
        seq = self.seq = run.task
        self.run, self.processors = run, processors
        self.request = request = seq.request
        self.sampler, self.stateful = request.sampler, request.sampler.stateful
        self.eos, self.ledger = request.eos_ids, seq.trace.ledger
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

    @property
    def unchanged(self) -> bool:
        """Whether nobody else has touched the text since the last step."""
        seq = self.seq
        return (
            seq.cache is self.cache
            and seq.tokens is self.tokens
            and seq.request is self.request
            and len(self.tokens) == self.length
            and seq.text is self.stream
            and seq.trace.steps is self.steps
        )


class ArrayBatch:
    """Steps of the texts that need nothing but the model.

    Such a text has no drafter, or one that `processors` know, processors that the kernels apply, the coupled rule, and
    neither monitors nor policies, sources or reports of probabilities. Where all tasks in progress are such texts, a
    step is one native call and what becomes of the tokens; where others share the pass, or something has changed, the
    engine's own step goes on with them, and they come back with the next one.

    Args:
        model: The engine's.
        schedule: The engine's.
    """

    def __init__(self, model: LanguageModel, schedule: Schedule) -> None:
        self._model, self._schedule = model, schedule
        self._texts: list[ArrayText] = []
        self._changes = -1
        self._steps: ArraySteps | None = None
        self._refused: dict[int, Any] = {}
        self._known: dict[int, ArrayText] = {}
        self._make = getattr(type(model), "array_steps", None)

    def gather(self) -> None:
        """Take in all tasks where they are texts that the batch can go on with, or none of them."""
        self._changes, self._texts = -1, []
        if self._make is None or self._schedule.waiting or len(runs := self._schedule.runs) > self._schedule.limits.rows:
            return
        found = [self._text(run) for run in runs]
        texts = [text for text in found if text is not None]
        if not texts or len(texts) < len(found) or not self._open(texts):
            self._known = {}
            return
        self._known = {id(text.seq): text for text in texts}
        self._texts, self._changes = texts, self._schedule.changes

    def _text(self, run: SchedulerEntry) -> ArrayText | None:
        """A task as a text of the batch, None where it cannot be one now."""
        seq = run.task
        if not isinstance(seq, Sequence) or seq.finish_reason is not None or seq.paused or run.coroutine is not None:
            return None
        if (known := self._known.get(id(seq))) is not None and known.run is run and known.request is seq.request:
            known.follow()
            return known if self._ready(seq) else None
        processors = self._processors(seq) if self._ready(seq) else None
        return None if processors is None else ArrayText(run, processors)

    def _ready(self, seq: Sequence) -> bool:
        """Whether a text has read all but its last token, into a cache that kernels can append to."""
        cache = seq.cache
        if not seq.position or seq.segment_end is not None or seq.scheduling.branches is not None:
            return False
        return (
            isinstance(cache, KVCache) and cache.next_position == len(seq.tokens) - 1 and OpenRows.serves(cache)
        )

    def _processors(self, seq: Sequence) -> NativeProcessors | None:
        """What the kernels apply to its logits; None where the text needs something that the batch lacks."""
        request = seq.request
        if request.model is not self._model or request.drafter is not None or request.acceptance_rule != _RULE:
            return None
        if request.monitors or request.cache_policy is not None or request.logits_source is not None:
            return None
        if request.logprobs is not None or request.return_draft_trees or seq.scheduling.prompt_owner is not None:
            return None
        if self._steps is None:
            self._steps = self._make(self._model, request.padding)  # type: ignore[misc]
            self._padding = request.padding
            if self._steps is None:
                self._make = None
        if self._steps is None or request.padding is not self._padding:
            return None
        return native_processors(request.sampler, request.vocab_size)

    def _open(self, texts: list[ArrayText]) -> bool:
        """Make room for one more row of every text, and write the arrays anew."""
        steps = self._steps
        assert steps is not None
        steps.plain(len(texts))
        for place, text in enumerate(texts):
            seq = text.seq
            expect(seq)
            try:
                text.rows.open(1)
            except Exception:
                return False
            if not text.rows.has_room(1):
                return False
            steps.describe(place, text.rows)
            steps.last[place], steps.next[place] = seq.tokens[-1], seq.cache.next_position
            steps.seeds[place], steps.drawn[place] = seq.request.seed, seq.position
            steps.processors[place], steps.processor_counts[place] = text.processors.address, text.processors.count
            steps.greedy[place] = text.sampler.greedy
            if text.stateful:
                text.processors.follow(seq.processor_states)
            text.run.caches.add(seq.cache)
            text.ledger.bytes = max(text.ledger.bytes, resident(text.run.caches))
        steps.turn_to(max(text.most for text in texts))
        return True

    def step(self, passes: int) -> list[Task] | None:
        """One step of all texts in one native call; None where something else has to be done first.

        Args:
            passes: Of the engine's model so far.
        """
        texts, steps = self._texts, self._steps
        if steps is None or self._schedule.changes != self._changes:
            return None
        begin = perf_counter()
        for text in texts:
            seq = text.seq
            if seq.finish_reason is not None or seq.paused or not text.unchanged or not text.rows.has_room(1):
                self._changes = -1
                return None
        try:
            steps.run()
        except Exception:
            # The engine's own step finds out whose fault it is.
            self._changes = -1
            return None
        scored = perf_counter()
        n = len(texts)
        accepted, chosen = steps.accepted[:n].tolist(), steps.chosen[:n].tolist()
        share, ended = (scored - begin) / n, False
        for place, text in enumerate(texts):
            token = chosen[place]
            if accepted[place] < 0 and (token := self._looked(place, text)) < 0:
                ended = True
                continue
            seq, ledger, run = text.seq, text.ledger, text.run
            text.cache.next_position += 1
            if text.stateful:
                seq.processor_states = self._after(text, token)
            text.tokens.append(token)
            text.length += 1
            ledger.tokens += 1
            _spend(ledger, share)
            run.served = passes + 1
            run.depth += 1
            if run.depth > ledger.depth:
                ledger.depth = run.depth
            if token in text.eos or text.stream is not None or text.length >= text.most:
                end_of(seq, token)
                ended = ended or seq.finish_reason is not None
            if text.windowed:
                text.cache.release_passed()
        done = perf_counter()
        times = (0.0, scored - begin, 0.0, done - scored, n)
        for text in texts:
            text.steps.append(Step(0, 0, 1, 1, False, *times, [], None))
        if ended:
            self._schedule.leave()
            self._changes = -1
        return [text.seq for text in texts]

    @in_plain_state
    def _looked(self, place: int, text: ArrayText) -> int:
        """The token of a text whose numbers the kernels could not tell apart; -1 where it has failed."""
        steps, seq = self._steps, text.seq
        assert steps is not None
        try:
            laws = NodeDistributions(DraftTree.root(seq.last_token), steps.logits[place : place + 1], seq)
            token = _RULE.choose(laws.tree, laws, seq).bonus
        except Exception as error:
            seq.fail(error)
            return -1
        steps.accepted[place], steps.chosen[place] = 0, token
        steps.keep(place)
        return token

    def _after(self, text: ArrayText, token: int) -> tuple[Any, ...]:
        """What the sampler's processors remember once a token is chosen; the kernels go by it from now."""
        states = text.sampler.follow(text.seq.processor_states, token)
        text.processors.follow(states)
        return states


def _spend(ledger: Ledger, seconds: float) -> None:
    """Enter one row of a pass."""
    if OWN in ledger.passes:
        ledger.passes[OWN] += 1
        ledger.rows[OWN] += 1
        ledger.seconds[OWN] += seconds
    else:
        ledger.spend(OWN, 1, seconds, first=True)
