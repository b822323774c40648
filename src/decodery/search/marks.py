"""Places in a text that a search may come back to."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

from decodery.core.trace import Step, Trace
from decodery.models.batch import Segment
from decodery.step.detokenizer import TextStream
from decodery.step.forward_request import ForwardCoroutine, score
from decodery.step.sequence import Sequence

from .base import choose


@dataclass(frozen=True, slots=True)
class TextSnapshot:
    """Where a text stood: its length, prompt included, and the states that acted on it there."""

    length: int
    processor_states: Any
    text: TextStream | None

    @classmethod
    def of(cls, seq: Sequence) -> TextSnapshot:
        return cls(len(seq.tokens), seq.processor_states, None if seq.text is None else seq.text.fork())

    def restore(self, seq: Sequence) -> None:
        """Let the text stand there again; its cache and its drafter are for the caller to bring back."""
        seq.tokens = seq.tokens[: self.length]
        seq.token_logprobs = seq.token_logprobs[: seq.position]
        seq.processor_states = self.processor_states
        seq.text = None if self.text is None else self.text.fork()
        seq.finish_reason = seq.stopped_by = None


def force(seq: Sequence, tokens: Ordered[int], trace: Trace) -> ForwardCoroutine[None]:
    """Write these tokens, up to the end of the text, as if they had been drawn; they are read in one pass.

    The drafter begins anew after them.
    """
    chunk = [seq.last_token, *tokens[:-1]]
    scored = yield from score(seq.request.model, Segment.chunk(chunk, seq.cache))
    seq.writable(scored.logits)
    before = len(seq.tokens)
    for row, token in enumerate(tokens):
        choose(seq, token, scored.logits[row])
        if seq.finished:
            break
    written = len(seq.tokens) - before
    seq.cache.keep(range(written))
    trace.steps.append(Step(rows=len(chunk)))
    if seq.request.drafter is not None:
        seq.states[seq.request.drafter], seq.observed = seq.request.drafter.start(seq), len(seq.tokens) - 1
