"""Caches that reuse keys and values of a canvas from pass to pass, though its rows attend both ways. One file each."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
