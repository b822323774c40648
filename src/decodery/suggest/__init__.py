"""Suggestions: several short continuations for little more than the passes of one."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
