"""Constraints on the texts that may be written, one per file."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
