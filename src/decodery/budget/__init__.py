"""How much to draft: policies, one per file, and what passes cost."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
