"""Grammars to token masks, by llguidance: an Earley parser over a trie of the vocabulary's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import ConstraintError
from ..model.vocabulary import Vocabulary
from ..sample.constraint import Constraint
from .spelling import end_mask, spelled
from .trial import LIMITS, first_line, require_compilable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_tokenizers: WeakKeyDictionary[Vocabulary, LLTokenizer] = WeakKeyDictionary()


class State:
    """Where a text stands. It keeps the states behind it, so that a draft and its verification walk them once.

    matcher: None after an end token, after a token that was not allowed (broken), or where the engine came upon a limit
    (failure: what it says). mask: [vocab] bool once asked for. forced: the canonical tokens of what must come next,
    once asked for.
    """

    __slots__ = ("broken", "failure", "forced", "mask", "matcher", "next")

    def __init__(self, matcher: LLMatcher | None, *, broken: bool = False, failure: str = "") -> None:
        self.matcher = matcher
        self.broken = broken
        self.failure = failure
        self.mask: np.ndarray | None = None
        self.forced: list[int] | None = None
        self.next: dict[int, State] = {}


class GrammarConstraint(Constraint):
    """A grammar of llguidance, as its `LLMatcher` takes it, for one vocabulary.

    Raises ConstraintError where the grammar cannot be compiled within the limits, or is found to have no text.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.vocabulary = vocabulary
        self._words = (vocabulary.size + 31) // 32
        self._ends = end_mask(vocabulary)
        require_compilable(grammar, vocabulary)
        limits: Any = LLParserLimits(**LIMITS)
        self._start = LLMatcher(_tokenizer(vocabulary), grammar, log_level=0, limits=limits)
        if self._start.is_error():
            raise ConstraintError(first_line(self._start.get_error()))

    def init(self, prompt: Sequence[int]) -> State:
        return State(self._start.deep_copy())

    def allowed(self, state: State) -> np.ndarray:
        if state.failure:
            raise ConstraintError(state.failure)
        if state.mask is None:
            state.mask = self._ends if state.matcher is None else self._computed(state.matcher)
        return state.mask

    def _computed(self, matcher: LLMatcher) -> np.ndarray:
        packed = np.zeros(self._words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(packed.ctypes.data, packed.nbytes)
        # The engine answers "the end" after an error; a text cut there would look complete.
        if matcher.is_error():
            raise ConstraintError(_failure(matcher))
        mask = np.unpackbits(packed.view(np.uint8), count=self.vocabulary.size, bitorder="little").view(bool)
        if not matcher.is_accepting():
            # A grammar can name the end token in its middle; the text would end there, incomplete.
            mask &= ~self._ends
        if not mask.any():
            raise ConstraintError(
                "the grammar asks for something no token can write, or for an end token in its middle"
            )
        mask.flags.writeable = False
        return mask

    def advance(self, state: State, token: int) -> State:
        found = state.next.get(token)
        if found is None:
            found = state.next[token] = self._after(state, token)
        return found

    def _after(self, state: State, token: int) -> State:
        if state.matcher is None:
            return State(None, broken=state.broken or token not in self.vocabulary.eos_ids, failure=state.failure)
        if token in self.vocabulary.eos_ids:
            return State(None, broken=not state.matcher.is_accepting())
        matcher = state.matcher.deep_copy()
        if matcher.consume_token(token):
            return State(matcher)
        # An error either way: the token is not allowed, or what follows it is beyond the limits.
        again = state.matcher.deep_copy()
        if again.validate_tokens([token]) == 0 and not again.is_error():
            return State(None, broken=True)
        return State(None, failure=_failure(matcher))

    def is_complete(self, state: State) -> bool:
        return not (state.broken or state.failure) if state.matcher is None else state.matcher.is_accepting()

    def permits(self, state: State, token: int) -> bool:
        if state.mask is not None or state.matcher is None or token in self.vocabulary.eos_ids:
            return bool(self.allowed(state)[token])
        # Not asked of the state's own matcher: one that comes upon a limit is of no use any more.
        return not self.advance(state, token).broken

    def accepts(self, state: State, token: int) -> bool:
        matcher = state.matcher
        if state.mask is not None or matcher is None:
            return bool(self.allowed(state)[token])
        if token in self.vocabulary.eos_ids:
            return matcher.is_accepting()
        if state.forced is None:
            state.forced = matcher.compute_ff_tokens()
        # Where a stretch is forced the mask holds its canonical token alone; the bare grammar takes any spelling.
        accepted = token == state.forced[0] if state.forced else matcher.validate_tokens([token]) == 1
        if matcher.is_error():
            raise ConstraintError(_failure(matcher))
        return accepted


class _Wrapper:
    """A vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = vocabulary.pieces
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = sorted(vocabulary.special_ids)

    def __call__(self, text: str) -> list[int]:
        return spelled(text, self._vocabulary)


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    found = _tokenizers.get(vocabulary)
    if found is None:
        from llguidance import LLTokenizer

        wrapper: Any = _Wrapper(vocabulary)
        found = LLTokenizer(wrapper, eos_token=list(vocabulary.eos_ids))
        _tokenizers[vocabulary] = found
    return found


def _failure(matcher: LLMatcher) -> str:
    said = first_line(matcher.get_error())
    if said.startswith("NoExtension"):
        return "the grammar begins a text that nothing can complete: see that every rule of it comes to an end"
    return f"the constraint is too complex at this point: {said}"
