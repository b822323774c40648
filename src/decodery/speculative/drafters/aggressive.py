"""Aggressive decoding: assume that the answer goes on copying a source text until it proves otherwise."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from decodery.core.errors import SettingsError
from decodery.core.registry import register
from decodery.step.draft_length_policy import Budget
from decodery.step.draft_tree import DraftTree
from decodery.step.drafter import Drafter
from decodery.step.sequence import Sequence


@dataclass(slots=True)
class _State:
    """source: the text that is edited. ends: for every n-gram of it, where it ends: indices of the token after it.

    pointer: the source token expected next, None where the answer has lost the source; last: the pointer it had when
    it was lost. read: tokens of the answer compared so far.
    """

    source: list[int]
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    pointer: int | None = None
    last: int = 0
    read: int = 0


@register(
    "aggressive",
    paper="Lossless Acceleration for Seq2seq Generation with Aggressive Decoding (2022)",
    lossless=True,
)
@dataclass(frozen=True)
class Aggressive(Drafter):
    """Drafts the rest of a source text that the answer edits, and aligns with it again after an edit.

    A place once found is kept while the answer agrees with it, so long copies go on from pass to pass. Scope: the
    request; memory: `max_ngram` dictionary entries per source token. Source: microsoft/unilm, decoding/IAD (2022).

    Attributes:
        source: Token ids of the text to be edited as they would stand at the start of an answer; empty for what an
            encoder reads, and without one for the whole prompt, which is then copied only once a match is found.
        max_ngram: After an edit the shortest end of the answer, up to this many tokens, that occurs exactly once in the
            source says where to go on.
        max_draft: Most tokens of a draft.
        ambiguous: Where even `max_ngram` tokens occur several times, copy nothing ("skip", published) or go on at the
            occurrence "nearest" after the place last copied from. This is the input-guided kind; the generalized kind
            is any other drafter, and its tolerance the rule "tolerance".
    """

    source: tuple[int, ...] = ()
    max_ngram: int = 3
    max_draft: int = 64
    ambiguous: Literal["skip", "nearest"] = "skip"

    def __post_init__(self) -> None:
        if self.max_ngram < 1 or self.max_draft < 1 or self.ambiguous not in ("skip", "nearest"):
            raise SettingsError("aggressive needs max_ngram >= 1, max_draft >= 1 and ambiguous 'skip' or 'nearest'")

    def largest(self) -> int:
        return self.max_draft

    def start(self, seq: Sequence) -> _State:
        if self.source and not 0 <= min(self.source) <= max(self.source) < seq.request.vocab_size:
            raise SettingsError(f"the source has token ids outside the model's vocabulary of {seq.request.vocab_size}")
        source = self.source or (() if seq.request.logits_source is None else seq.request.logits_source.read)
        state = _State(list(source or seq.tokens), pointer=0 if source else None)
        for n in range(1, self.max_ngram + 1):
            for end in range(n, len(state.source) + 1):
                state.ends.setdefault(tuple(state.source[end - n : end]), []).append(end)
        return state

    def propose(self, seq: Sequence, budget: Budget) -> DraftTree:
        state: _State = seq.states[self]
        self._align(state, seq)
        if state.pointer is None:
            return DraftTree.root(seq.last_token)
        length = min(self.max_draft, budget.nodes, budget.depth)
        return DraftTree.chain(seq.last_token, state.source[state.pointer : state.pointer + length])

    def _align(self, state: _State, seq: Sequence) -> None:
        """Move the pointer over what was emitted since; where it disagrees, look the answer's end up."""
        emitted = seq.tokens[seq.request.prompt_length + state.read :]
        state.read += len(emitted)
        for token in emitted:
            if state.pointer is None or state.pointer == len(state.source) or state.source[state.pointer] != token:
                state.pointer = None
                break
            state.pointer += 1
            state.last = state.pointer
        if state.pointer is None:
            state.pointer = self._match(state, seq.tokens[seq.request.prompt_length :][-self.max_ngram :])

    def _match(self, state: _State, suffix: list[int]) -> int | None:
        """Where in the source the answer, which ends with `suffix`, goes on; None where that is not clear."""
        found: list[int] = []
        for n in range(1, len(suffix) + 1):
            ends = state.ends.get(tuple(suffix[-n:]))
            if ends is None:
                return None if self.ambiguous == "skip" else self._nearest(state, found)
            found = ends
            if len(found) == 1:
                return found[0]
        return self._nearest(state, found) if self.ambiguous == "nearest" else None

    @staticmethod
    def _nearest(state: _State, ends: list[int]) -> int | None:
        """The first of `ends` (ascending) after the place last copied from."""
        at = bisect_left(ends, state.last)
        return ends[at] if at < len(ends) else None
