"""Writing while a source arrives, one way per file: what is committed, and when."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
