"""Inference-time searches: several texts are followed for one answer."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
