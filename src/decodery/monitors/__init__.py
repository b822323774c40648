"""Cache policies, one per file: what of a text's keys and values is kept, and what of them is read."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
