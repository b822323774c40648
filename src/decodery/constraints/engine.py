"""Grammars to token masks, by llguidance: an Earley parser over a trie of the vocabulary's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from decodery.core.errors import ConstraintError
from decodery.models.tokenizers.vocabulary import Vocabulary
from decodery.sampling.constraint import Constraint, packed, require_size

from .shortest import BYTES, QUICK, THOROUGH, shortest
from .spelling import end_mask, sorted_pieces, spelled
from .trial import LIMITS, first_line, require_compilable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_FORBIDDEN = "doesn't satisfy the grammar"
"""In what the engine says of a token that is not allowed; whatever else it says is a limit."""

_tokenizers: WeakKeyDictionary[Vocabulary, LLTokenizer] = WeakKeyDictionary()


class _Lexer:
    """What all copies of one matcher share. spoiled: it came upon a limit, after which it knows no text any more."""

    __slots__ = ("spoiled", "start")

    def __init__(self, start: LLMatcher) -> None:
        self.start = start
        self.spoiled = False


class GrammarState:
    """Where a text stands.

    It keeps the states after it, so that a draft and its verification walk them once.

    Args:
        matcher: None after an end token, after a token that was not allowed (broken), or where the engine came upon a
            limit (failure: what it says).
        lexer: What it shares.
        path: The tokens so far, (path before the last one, last one).
        bits, mask: See `Constraint.bits`, and [vocab] bool, once asked for.
        forced: The canonical tokens of what must come next, once asked for.
        sound: The lexer was seen to know this state.
    """

    __slots__ = ("bits", "broken", "failure", "forced", "lexer", "mask", "matcher", "next", "path", "sound")

    def __init__(
        self,
        matcher: LLMatcher | None,
        lexer: _Lexer,
        path: tuple[Any, ...] = (),
        *,
        broken: bool = False,
        failure: str = "",
    ) -> None:
        self.matcher = matcher
        self.lexer = lexer
        self.path = path
        self.broken = broken
        self.failure = failure
        self.bits: np.ndarray | None = None
        self.mask: np.ndarray | None = None
        self.forced: list[int] | None = None
        self.sound = False
        self.next: dict[int, GrammarState] = {}


class GrammarConstraint(Constraint):
    """A grammar of llguidance, as its `LLMatcher` takes it, for one vocabulary.

    All states of a text share the engine's lexer, which computes what it knows as it is asked. Where that comes upon a
    limit it is of no use to any of them, so a state that needs it gets a new one and is walked to again, mask by mask,
    as plain decoding would: a limit in a draft that is not taken, or in another text, ends nothing.

    Raises:
        ConstraintError: If the grammar cannot be compiled within the limits, or is found to have no text.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str, *, stops: bool = False) -> None:
        self.vocabulary, self.stops = vocabulary, stops
        self._grammar = grammar
        self._words = (vocabulary.size + 31) // 32
        self._ends = packed(end_mask(vocabulary))
        require_compilable(grammar, vocabulary)
        self._lexer = self._compiled()
        if self._lexer.start.is_error():
            raise ConstraintError(first_line(self._lexer.start.get_error()))

    def _compiled(self) -> _Lexer:
        from llguidance import LLMatcher, LLParserLimits

        limits: Any = LLParserLimits(**LIMITS)
        return _Lexer(LLMatcher(_tokenizer(self.vocabulary), self._grammar, log_level=0, limits=limits))

    def init(self, prompt: Sequence[int]) -> GrammarState:
        return GrammarState(self._lexer.start.deep_copy(), self._lexer)

    def allowed(self, state: GrammarState) -> np.ndarray:
        if state.mask is None:
            size = self.vocabulary.size
            state.mask = np.unpackbits(self.bits(state, size).view(np.uint8), count=size, bitorder="little").view(bool)
            state.mask.flags.writeable = False
        return state.mask

    def bits(self, state: GrammarState, vocab_size: int) -> np.ndarray:
        require_size(self.vocabulary.size, vocab_size)
        if state.bits is None and not state.failure:
            state.bits = self._ends if state.matcher is None else self._computed(state)
        if state.bits is None:
            raise ConstraintError(state.failure)
        return state.bits

    def _computed(self, state: GrammarState) -> np.ndarray | None:
        """The bits; None where there are none, and the state's failure says why."""
        for _ in range(2):
            matcher = self._usable(state)
            found = self._packed(matcher)
            # The engine answers "the end" after an error; a text cut there would look complete.
            if not (matcher.is_error() and _spoils(matcher, state.lexer)):
                break
        if matcher.is_error():
            state.failure = _failure(matcher)
            return None
        if not matcher.is_accepting():
            # A grammar can name the end token in its middle; the text would end there, incomplete.
            found &= ~self._ends
        if not found.any():
            state.failure = "the grammar requires something that no token can write, or an end token in its middle"
            return None
        return found

    def _packed(self, matcher: LLMatcher) -> np.ndarray:
        found = np.zeros(self._words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        return found

    def _usable(self, state: GrammarState) -> LLMatcher:
        """The state's matcher, made anew where its lexer is spoiled."""
        assert state.matcher is not None
        if state.lexer.spoiled:
            if self._lexer.spoiled:
                self._lexer = self._compiled()
            state.lexer, state.matcher = self._lexer, self._lexer.start.deep_copy()
            tokens, path = [], state.path
            while path:
                path, token = path
                tokens.append(token)
            for token in reversed(tokens):
                self._packed(state.matcher)
                if not state.matcher.consume_token(token):
                    break
        return state.matcher

    def advance(self, state: GrammarState, token: int) -> GrammarState:
        if (found := state.next.get(token)) is None:
            found = state.next[token] = self._after(state, token)
        return found

    def _after(self, state: GrammarState, token: int) -> GrammarState:
        lexer, path = state.lexer, (state.path, token)
        if state.matcher is None:
            broken = state.broken or token not in self.vocabulary.eos_ids
            return GrammarState(None, lexer, path, broken=broken, failure=state.failure)
        if token in self.vocabulary.eos_ids:
            return GrammarState(None, lexer, path, broken=not self.is_complete(state))
        for _ in range(2):
            matcher = self._usable(state).deep_copy()
            over = matcher.is_stopped() and not matcher.is_error()
            if not over and matcher.consume_token(token):
                return GrammarState(matcher, state.lexer, path)
            if over or _FORBIDDEN in matcher.get_error():
                return GrammarState(None, lexer, path, broken=True)
            if not _spoils(matcher, state.lexer):
                break
        return GrammarState(None, lexer, path, failure=_failure(matcher))

    def is_complete(self, state: GrammarState) -> bool:
        if state.matcher is None:
            return not (state.broken or state.failure)
        return self._usable(state).is_accepting()

    def completion(self, state: GrammarState, *, thorough: bool = False) -> list[int] | None:
        if state.matcher is None:
            return None
        tokens, path = list[int](), state.path
        while path:
            path, token = path
            tokens.append(token)
        text = shortest(self._of_bytes, self.vocabulary.bytes_of(tokens[::-1]), THOROUGH if thorough else QUICK)
        return None if text is None else self._written(state, text)

    def takes(self, state: GrammarState, tokens: Sequence[int]) -> bool:
        return state.matcher is not None and self._usable(state).validate_tokens(list(tokens)) == len(tokens)

    def forced_bytes(self, state: GrammarState) -> bytes:
        """The text that must come next, as far as there is only one."""
        return b"" if state.matcher is None else self._usable(state).compute_ff_bytes()

    @cached_property
    def _of_bytes(self) -> GrammarConstraint:
        """The same grammar, byte by byte."""
        return GrammarConstraint(BYTES, self._grammar)

    def _written(self, state: GrammarState, text: bytes) -> list[int] | None:
        """A text in tokens that may come next, each as long as can be; None where they come to nothing."""
        tokens = list[int]()
        while text:
            heads = (text[:size] for size in range(min(self._longest, len(text)), 0, -1))
            fit = (id for head in heads for id in self._ids.get(head, ()) if self.accepts(state, id))
            if (token := next(fit, None)) is None:
                return None
            tokens.append(token)
            text, state = text[len(self.vocabulary.pieces[token]) :], self.advance(state, token)
        return tokens if self.is_complete(state) else None

    @cached_property
    def _ids(self) -> dict[bytes, list[int]]:
        """Tokens by their text."""
        found = dict[bytes, list[int]]()
        for piece, id in zip(*sorted_pieces(self.vocabulary), strict=True):
            found.setdefault(piece, []).append(id)
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def permits(self, state: GrammarState, token: int) -> bool:
        if state.bits is not None or state.matcher is None or token in self.vocabulary.eos_ids:
            return self._bit(state, token)
        return self._usable(state).validate_tokens([token]) == 1

    def _bit(self, state: GrammarState, token: int) -> bool:
        return bool(self.bits(state, self.vocabulary.size)[token // 32] >> token % 32 & 1)

    def accepts(self, state: GrammarState, token: int) -> bool:
        if state.bits is not None or state.matcher is None:
            return self._bit(state, token)
        if token in self.vocabulary.eos_ids:
            return self.is_complete(state)
        if self._usable(state).validate_tokens([token]) != 1:
            if state.sound:
                return False
            # A spoiled lexer refuses all tokens and does not say so, but to `advance`. Asking costs a hundred times as
            # much, so it is done once per state: one that is spoiled later on accepts nothing, which is an error.
            state.sound = True
            if self.advance(state, token).broken:
                return False
        # Where a stretch is forced the mask holds its canonical token alone; the bare grammar takes any spelling.
        if state.forced is None:
            state.forced = self._usable(state).compute_ff_tokens()
        return not state.forced or token == state.forced[0]


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
    if (found := _tokenizers.get(vocabulary)) is None:
        from llguidance import LLTokenizer

        wrapper: Any = _Wrapper(vocabulary)
        found = LLTokenizer(wrapper, eos_token=list(vocabulary.eos_ids))
        _tokenizers[vocabulary] = found
    return found


def _spoils(matcher: LLMatcher, lexer: _Lexer) -> bool:
    """Whether what went wrong with the matcher is a limit of the lexer it shares, which is of no use from now on."""
    lexer.spoiled = lexer.spoiled or matcher.get_error().startswith("lexer error")
    return lexer.spoiled


def _failure(matcher: LLMatcher) -> str:
    said = first_line(matcher.get_error())
    if said.startswith("NoExtension"):
        return "the grammar begins a text that nothing can complete: see that every rule of it comes to an end"
    return f"the constraint is too complex at this point: {said}"
