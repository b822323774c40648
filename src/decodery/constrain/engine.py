"""Grammars to token masks, by llguidance: an Earley parser over a trie of the vocabulary's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import ConstraintError, UnsupportedModel
from ..model.vocabulary import Vocabulary
from ..sample.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MARK = "\x02"
_tokenizers: WeakKeyDictionary[Vocabulary, LLTokenizer] = WeakKeyDictionary()


class State:
    """Where a text stands. It keeps the states behind it, so that a draft and its verification walk them once.

    matcher: None after an end token, or after a token that was not allowed (broken). mask: [vocab] bool once asked for.
    forced: the canonical tokens of what must come next, once asked for.
    """

    __slots__ = ("broken", "forced", "mask", "matcher", "next")

    def __init__(self, matcher: LLMatcher | None, broken: bool = False) -> None:
        self.matcher = matcher
        self.broken = broken
        self.mask: np.ndarray | None = None
        self.forced: list[int] | None = None
        self.next: dict[int, State] = {}


class GrammarConstraint(Constraint):
    """A grammar of llguidance, as its `LLMatcher` takes it, for one vocabulary.

    Raises ConstraintError where the grammar cannot be compiled within the limits.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        from llguidance import LLMatcher

        self.vocabulary = vocabulary
        self._words = (vocabulary.size + 31) // 32
        self._ends = np.zeros(vocabulary.size, dtype=bool)
        self._ends[list(vocabulary.eos_ids)] = True
        self._ends.flags.writeable = False
        self._start = LLMatcher(_tokenizer(vocabulary), grammar, log_level=0, limits=_limits())
        if self._start.is_error():
            raise ConstraintError(first_line(self._start.get_error()))

    def init(self, prompt: Sequence[int]) -> State:
        return State(self._start.deep_copy())

    def allowed(self, state: State) -> np.ndarray:
        if state.mask is None:
            state.mask = self._ends if state.matcher is None else self._computed(state.matcher)
        return state.mask

    def _computed(self, matcher: LLMatcher) -> np.ndarray:
        packed = np.zeros(self._words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(packed.ctypes.data, packed.nbytes)
        # The engine answers "the end" after an error; a text cut there would look complete.
        if matcher.is_error():
            raise ConstraintError(_too_complex(matcher))
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
            return State(None, state.broken or token not in self.vocabulary.eos_ids)
        if token in self.vocabulary.eos_ids:
            return State(None, not state.matcher.is_accepting())
        matcher = state.matcher.deep_copy()
        return State(matcher) if matcher.consume_token(token) else State(None, broken=True)

    def is_complete(self, state: State) -> bool:
        return not state.broken if state.matcher is None else state.matcher.is_accepting()

    def permits(self, state: State, token: int) -> bool:
        if state.mask is not None or state.matcher is None or token in self.vocabulary.eos_ids:
            return bool(self.allowed(state)[token])
        return state.matcher.validate_tokens([token]) == 1

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
            raise ConstraintError(_too_complex(matcher))
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
        """The tokens of a text inside another one: a tokenizer may put a space before what begins a text."""
        tokens = self._vocabulary.encode(_MARK + text)
        for count in range(1, len(tokens)):
            if self._vocabulary.bytes_of(tokens[:count]).lstrip() == _MARK.encode():
                return tokens[count:]
        return self._vocabulary.encode(text)


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    found = _tokenizers.get(vocabulary)
    if found is None:
        from llguidance import LLTokenizer

        if not vocabulary.eos_ids:
            raise UnsupportedModel("the model has no end token, so a constrained text could not end")
        wrapper: Any = _Wrapper(vocabulary)
        found = LLTokenizer(wrapper, eos_token=list(vocabulary.eos_ids))
        _tokenizers[vocabulary] = found
    return found


def _limits() -> Any:
    """What one grammar may cost; the engine's own limits but for memory, of which a state of its lexer takes 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _too_complex(matcher: LLMatcher) -> str:
    return f"the constraint is too complex at this point: {first_line(matcher.get_error())}"


def first_line(message: str) -> str:
    """What the engine says without its inner state."""
    return message.strip().partition("\n")[0].removesuffix("<non-verbose/>").strip()
