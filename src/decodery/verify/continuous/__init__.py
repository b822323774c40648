"""Rules for models of continuous values, which verify vectors in place of tokens. One file per rule."""

from ...faces import face

__getattr__, __dir__ = face(__name__)
