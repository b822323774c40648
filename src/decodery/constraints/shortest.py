"""The shortest text that completes what a grammar has begun: a search over the grammar's states, byte by byte.

Bytes are the least that the engine can be asked about, so layer n of the search holds texts of n bytes, and the first
complete one is a shortest one among those that were kept. Of states that allow the same bytes a few are kept. What is
found can always be written, so its length is a bound; a shorter text may be overlooked where that merges too much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from decodery.core.errors import ConstraintError
from decodery.models.tokenizers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from .engine import GrammarConstraint

_END = 256
BYTES = Vocabulary([bytes([byte]) for byte in range(_END)] + [b""], frozenset({_END}), (_END,), lambda t: [*t.encode()])
"""A vocabulary of all bytes, for which a grammar is compiled to be searched."""
_FEW = 16
"""Where more bytes than this may come next, letters and digits stand for each other in a quick search."""
_STANDING = frozenset(b"09AZaz")
_IDLE = frozenset(b" \t\n\r\\")
"""Space and escapes, which a quick search tries only where nothing else may come: few texts are shorter by them."""
_ASCII = 0x80


class Effort(NamedTuple):
    """How far to look.

    Attributes:
        alike: States of a layer that allow the same bytes and are kept: half of them those that have changed most often
            in what they allow, and half the last ones.
        again: How often such a state is come to from another one, over all layers.
        steps: States looked at in all.
        whole: Whether every byte is tried, and also to stay in a state that allows the same bytes where it can be left.
    """

    alike: int
    again: int
    steps: int
    whole: bool


QUICK, THOROUGH = Effort(2, 200, 6_000, False), Effort(8, 256, 20_000, True)


def shortest(grammar: GrammarConstraint, text: bytes, effort: Effort) -> bytes | None:
    """What completes a text.

    Args:
        grammar: A grammar that was compiled for `BYTES`.
        text: What is written so far, which the grammar allows.
        effort: How far to look.

    Returns:
        The shortest completion that was found, b"" for a complete text, None where none was.
    """
    state: Any = grammar.init([])
    for byte in text:
        state = grammar.advance(state, byte)
    looked, seen = 0, dict[bytes, int]()
    try:
        layer = [_Begun(b"", state, _name(grammar, state))]
        while layer and looked <= effort.steps:
            if (done := next((each for each in layer if grammar.is_complete(each.state)), None)) is not None:
                return done.text
            alike = dict[bytes, list[_Begun]]()
            for each in layer:
                after = _after(grammar, each, effort)
                looked += len(after)
                for one in after:
                    alike.setdefault(one.name, []).append(one)
            layer = []
            for name, some in alike.items():
                half = effort.alike // 2
                some.sort(key=lambda one: -one.turns)
                kept = [*some[:half], *some[half:][-half:]]
                came = sum(not one.stays for one in kept)
                if came and (known := seen.get(name, 0)) >= effort.again:
                    kept = [one for one in kept if one.stays]
                elif came:
                    seen[name] = known + 1
                layer += kept
    except ConstraintError:
        # The engine came upon a limit: nothing is known of what comes after it.
        return None
    return None


class _Begun(NamedTuple):
    """A completion in progress.

    Attributes:
        name: Identifies its state.
        turns: How often the state has changed.
        stays: Whether the last byte left it unchanged.
    """

    text: bytes
    state: Any
    name: bytes
    turns: int = 0
    stays: bool = False


def _after(grammar: GrammarConstraint, begun: _Begun, effort: Effort) -> list[_Begun]:
    """The same with one byte more."""
    allowed, found = grammar.allowed(begun.state), list[_Begun]()
    for byte in _next(allowed, effort.whole):
        state = grammar.advance(begun.state, byte)
        name = _name(grammar, state)
        stays = name == begun.name
        found.append(_Begun(begun.text + bytes([byte]), state, name, begun.turns + (not stays), stays))
    leaving = [each for each in found if not each.stays]
    return found if effort.whole or not leaving else leaving


def _name(grammar: GrammarConstraint, state: Any) -> bytes:
    """What tells a state from others: the bytes that may come next, of a stretch that is forced all of it."""
    mask = grammar.allowed(state)
    forced = b"" if np.count_nonzero(mask) > 1 else grammar.forced_bytes(state)
    return forced or mask.tobytes()


def _next(allowed: np.ndarray, whole: bool) -> Iterable[int]:
    """The bytes that are tried."""
    found = [int(byte) for byte in np.flatnonzero(allowed[:_END])]
    plain = [byte for byte in found if byte < _ASCII] or found
    if whole:
        return plain
    plain = [byte for byte in plain if byte not in _IDLE] or plain
    if len(plain) <= _FEW:
        return plain
    return [byte for byte in plain if byte in _STANDING or not bytes([byte]).isalnum()]
