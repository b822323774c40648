"""Suggestions: several short continuations for little more than the passes of one."""

from .ngrams import NGrams, load_ngrams
from .superposed import Draft, Superposition

__all__ = ["Draft", "NGrams", "Superposition", "load_ngrams"]
