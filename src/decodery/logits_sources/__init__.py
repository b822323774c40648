"""Logits sources, one per file: they compute the logits of a text in place of one model in one context."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
