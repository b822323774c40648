"""How much to draft: policies, one per file, and what passes cost."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
