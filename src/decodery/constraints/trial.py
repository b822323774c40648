"""Grammars are compiled on trial first, where that can be stopped."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from decodery.core.errors import ConstraintError
from decodery.core.worker_pool import NotStarted, Unanswered, WorkerPool
from decodery.models.tokenizers.vocabulary import Vocabulary

LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""What one grammar may cost; the engine's own limits but for memory, of which a state of its lexer takes 2 kB."""
MOST_SECONDS = 5.0
"""Schemas that people write take milliseconds."""
_MEMORY = 1 << 30
_REMEMBERED = 4096


class _Tried:
    """What is known of a vocabulary.

    description: what decides whether a grammar can be compiled, its size, special tokens and ends. passed: hashes of
    grammars that could.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = [(id, vocabulary.pieces[id].decode("latin-1")) for id in sorted(vocabulary.special_ids)]
        self.description = [vocabulary.size, special, list(vocabulary.eos_ids)]
        self.passed: set[bytes] = set()


_tried: WeakKeyDictionary[Vocabulary, _Tried] = WeakKeyDictionary()


def require_compilable(grammar: str, vocabulary: Vocabulary) -> None:
    """Raise ConstraintError for a grammar that is wrong, empty or too expensive to compile.

    A process apart tries it, once per grammar: that takes as long as compiling it.
    """
    tried = _tried.get(vocabulary)
    if tried is None:
        tried = _tried[vocabulary] = _Tried(vocabulary)
    name = hashlib.sha256(grammar.encode()).digest()
    if name not in tried.passed:
        _try(grammar, tried.description)
        if len(tried.passed) >= _REMEMBERED:
            tried.passed.clear()
        tried.passed.add(name)


def _try(grammar: str, vocabulary: list[Any]) -> None:
    question = {"grammar": grammar, "vocabulary": vocabulary, "limits": LIMITS}
    try:
        answer = _workers.ask(question, MOST_SECONDS)
    except NotStarted as error:
        raise ConstraintError(
            "the process that tries grammars does not start: check that `import llguidance` works"
        ) from error
    except Unanswered as error:
        # The engine ends its process where memory or stack are used up; neither is told from the other.
        raise ConstraintError(
            f"compiling the constraint was stopped: {error} (it may take {MOST_SECONDS:g} s, {_MEMORY >> 30} GiB and "
            "the engine's stack); ask for less (fewer properties, rules or alternatives, shorter patterns, a smaller "
            "multipleOf)"
        ) from error
    if answer["empty"]:
        raise ConstraintError("the constraint allows no text at all: something in it contradicts itself")
    if answer["error"]:
        raise ConstraintError(("it is too complex: " if answer["begun"] else "") + first_line(answer["error"]))


def first_line(message: str) -> str:
    """What the engine says without its inner state."""
    return message.strip().partition("\n")[0].removesuffix("<non-verbose/>").strip()


_workers = WorkerPool(Path(__file__).with_name("grammar_worker.py"), memory=_MEMORY)
