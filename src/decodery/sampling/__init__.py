"""Logits processors, one per file, and the sampler that applies them in order and draws tokens."""

from decodery.core.lazy_exports import face

__getattr__, __dir__ = face(__name__)
