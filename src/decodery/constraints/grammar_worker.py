"""The process in which the grammar engine tries whether it can compile a grammar.

No limit of the engine's own holds for all it does while compiling: remainders of a `multipleOf`, thousands of
properties and rules that lead to each other take time and memory without bound, or end the process. It is run as a file
by a `WorkerPool`, which bounds both, so that nothing but the engine is loaded.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from itertools import count, islice
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_STACK = 4 << 20
"""Bytes: half of what Linux gives the thread in which the same is compiled again."""


def begin() -> Callable[[dict[str, Any]], dict[str, Any]]:
    return answer


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What is wrong with a grammar for the vocabulary the question describes.

    Returns:
        A dictionary. "error" is what the engine says, or nothing; "begun" whether it says so of the text's beginning,
        not of the grammar; "empty" whether no text belongs to the grammar, as far as its beginning tells.
    """
    found: list[dict[str, Any]] = []
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: found.append(_tried(question)))
    thread.start()
    thread.join()
    return found[0]


def _tried(question: dict[str, Any]) -> dict[str, Any]:
    limits = LLParserLimits(**question["limits"])
    matcher = LLMatcher(_tokenizer(json.dumps(question["vocabulary"])), question["grammar"], log_level=0, limits=limits)
    if matcher.is_error():
        return {"error": matcher.get_error(), "begun": False, "empty": False}
    empty = not any(matcher.compute_bitmask()) or matcher.get_error().startswith("NoExtension")
    # What is forced cannot be avoided, and neither can the limits it comes upon.
    matcher.consume_tokens(matcher.compute_ff_tokens())
    return {"error": matcher.get_error(), "begun": True, "empty": empty}


class _Bytes:
    """A vocabulary of the same size and special tokens as a model's, else of single bytes only."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, special: list[tuple[int, str]], ends: list[int]) -> None:
        self.special_token_ids = [id for id, _ in special]
        self.eos_token_id = ends[0]
        taken = set(self.special_token_ids)
        free = list(islice((id for id in count() if id not in taken), 256))
        self.tokens = [b""] * max(size, free[-1] + 1)
        for byte, id in enumerate(free):
            self.tokens[id] = bytes([byte])
        for id, text in special:
            self.tokens[id] = text.encode("latin-1")
        self._free = free

    def __call__(self, text: str) -> list[int]:
        return [self._free[byte] for byte in text.encode()]


@functools.lru_cache(maxsize=4)
def _tokenizer(vocabulary: str) -> Any:
    size, special, ends = json.loads(vocabulary)
    wrapper: Any = _Bytes(size, special, ends)
    return LLTokenizer(wrapper, eos_token=ends)
