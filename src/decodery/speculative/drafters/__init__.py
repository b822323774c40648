"""Drafters, one per file, and what combines them."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
