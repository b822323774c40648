"""Scorers: how good beginnings and answers are, by whatever tells it."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
