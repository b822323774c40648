"""Masked diffusion models: texts that are written out of order, several tokens a pass. One file per method."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
