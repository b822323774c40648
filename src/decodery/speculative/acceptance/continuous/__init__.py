"""Rules for models of continuous values, which verify vectors in place of tokens. One file per rule."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
