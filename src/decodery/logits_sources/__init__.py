"""Logit sources, one per file: what a text is scored by in place of one model in one context."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
