"""Drafters, one per file, and what combines them."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
