"""Grammars in the dialect of Lark that the engine reads."""

from __future__ import annotations

from .base import Mode


def lark(rules: str, mode: Mode) -> str:
    """The engine's form of a grammar; strict: no spelling of forced text is preferred."""
    from llguidance import LLMatcher

    options = '%llguidance {"no_forcing": true}\n' if mode == "strict" else ""
    return LLMatcher.grammar_from_lark(f"{options}{rules}\n")
