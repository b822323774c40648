"""A text of the batch in arrays: what a step needs of it, at hand."""

from __future__ import annotations

from decodery.models.cache.cache import KVCache
from decodery.models.cache.open_rows import OpenRows
from decodery.sampling.native_processors import NativeProcessors
from decodery.step.bound_request import BoundRequest
from decodery.step.sequence import Sequence

from .accounting import OWN
from .commit import end_of
from .task import SchedulerEntry


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
        "cache", "eos", "ledger", "length", "most", "processors", "request", "room", "rows", "run", "sampler", "seq",
        "stateful", "steps", "stream", "tokens", "windowed",
    )  # fmt: skip

    def __init__(self, run: SchedulerEntry, processors: NativeProcessors) -> None:
        assert isinstance(run.task, Sequence)
        seq = self.seq = run.task
        self.run, self.processors = run, processors
        self.request = request = seq.request
        self.sampler, self.stateful = request.sampler, request.sampler.stateful
        self.eos, self.ledger = request.eos_ids, seq.trace.ledger
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
        seq, emitted = self.seq, list[int]()
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

    @property
    def unchanged(self) -> bool:
        """Whether nothing else has changed the text since the last step."""
        seq = self.seq
        return (
            seq.cache is self.cache
            and seq.tokens is self.tokens
            and seq.request is self.request
            and len(self.tokens) == self.length
            and seq.text is self.stream
            and seq.trace.steps is self.steps
        )
