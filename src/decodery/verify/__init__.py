"""Which drafts become text: rules, one per file."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
