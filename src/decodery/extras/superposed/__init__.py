"""Suggestions: several short continuations for little more than the passes of one."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
