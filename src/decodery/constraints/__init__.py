"""What may be written: constraints, one per file."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
