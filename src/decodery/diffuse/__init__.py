"""Masked diffusion models: texts that are written out of order, several tokens a pass. One file per method."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
