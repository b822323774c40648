"""Inference-time searches: several texts are followed for one answer."""

from ..faces import face

__getattr__, __dir__ = face(__name__)
