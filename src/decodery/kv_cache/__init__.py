"""KV cache policies, one per file: which keys and values of a text are kept, and which of them each row reads."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
