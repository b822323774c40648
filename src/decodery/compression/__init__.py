"""Transformations, one per file: a model in, a cheaper model out, and a report of what that cost."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
